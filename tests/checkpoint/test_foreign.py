"""Checkpoints of others: read whole, taken over, and nothing of what is in them is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import resilience
from resilience.checkpoint import cli, foreign
from resilience.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning"
)  # one process is what is meant


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state() -> dict[str, Any]:
    model, optimizer = get_state_dict(*trained(0))
    return {"model": model, "optimizer": optimizer}


def as_dcp(path: Path) -> Path:
    dcp.save(whole_state(), checkpoint_id=str(path), no_dist=True)
    return path


def as_torch(path: Path) -> Path:
    torch.save(whole_state(), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def as_safetensors(path: Path) -> Path:
    tensors = {f"model.{name}": tensor for name, tensor in whole_state()["model"].items()}
    safetensors.torch.save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


@pytest.mark.spawns
@pytest.mark.parametrize("write", [as_dcp, as_torch])
def test_what_others_saved_is_gone_on_from(tmp_path: Path, write: Any) -> None:
    theirs = write(tmp_path / "theirs")
    assert cli.main(["import", str(tmp_path / "ours"), str(theirs), "--step=41"]) == 0
    model, optimizer = trained(1)
    with resilience.FlashCheckpoint(tmp_path / "ours", model=model, optimizer=optimizer) as checkpoint:
        assert checkpoint.restore() == 42
    origin, origins = trained(0)
    for one, other in zip(model.parameters(), origin.parameters(), strict=True):
        assert torch.equal(one, other)
        mine, its = optimizer.state[one], origins.state[other]
        assert all(torch.equal(mine[key], its[key]) for key in its)
        assert mine.keys() == its.keys()
    assert optimizer.param_groups[0]["lr"] == origins.param_groups[0]["lr"]


@pytest.mark.spawns
def test_weights_alone_are_gone_on_from_by_their_names(tmp_path: Path) -> None:
    theirs = as_safetensors(tmp_path / "theirs")
    assert cli.main(["import", str(tmp_path / "ours"), str(theirs), "--step=0", "--name=model=net"]) == 0
    model, _ = trained(1)
    with resilience.FlashCheckpoint(tmp_path / "ours", net=model) as checkpoint:
        assert checkpoint.restore() == 1
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), trained(0)[0].parameters(), strict=True))


@pytest.mark.spawns
def test_directory_that_has_checkpoints_is_left_as_it_is(tmp_path: Path) -> None:
    theirs = as_dcp(tmp_path / "theirs")
    for_the_first_time = ["import", str(tmp_path / "ours"), str(theirs), "--step=41"]
    assert cli.main(for_the_first_time) == 0
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        cli.main(["import", str(tmp_path / "ours"), str(theirs), "--step=50"])


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path(EVIDENCE[0]),)


EVIDENCE = ["nowhere"]


@pytest.mark.parametrize("place", ["description", "value", "file"])
def test_nothing_that_a_file_asks_for_is_run(tmp_path: Path, place: str) -> None:
    EVIDENCE[0] = str(tmp_path / "ran")
    if place == "file":
        path = tmp_path / "theirs.pt"
        torch.save({"model": Evil()}, path)
    elif place == "value":
        path = tmp_path / "theirs"
        dcp.save({"model": {"a": torch.ones(1)}, "evil": Evil()}, checkpoint_id=str(path), no_dist=True)
    else:
        path = as_dcp(tmp_path / "theirs")
        (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "ran").unlink(missing_ok=True)  # copies of it may have been made while it was saved
    with pytest.raises(CheckpointError, match="can't be read"):
        foreign.read(path)
    assert not (tmp_path / "ran").exists()
    EVIDENCE[0] = str(tmp_path / "ran")
    Evil().__reduce__()[0](*Evil().__reduce__()[1])
    assert (tmp_path / "ran").exists(), "it would have been seen"


@pytest.mark.parametrize("what", ["nothing", "no checkpoint", "cut short"])
def test_what_is_no_checkpoint_is_said(tmp_path: Path, what: str) -> None:
    path = tmp_path / "theirs.pt"
    if what == "no checkpoint":
        path.write_text("hello")
    elif what == "cut short":
        torch.save({"model": torch.ones(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"theirs\.pt can't be read"):
        foreign.read(path)


def test_tensor_alone_is_no_state(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "one.pt")
    with pytest.raises(CheckpointError, match="a Tensor where parts by their names were expected"):
        foreign.read(tmp_path / "one.pt")


def test_folder_that_is_none_of_dcp_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is no directory of torch\.distributed\.checkpoint: it has no \.metadata\.$"
    ):
        foreign.read(tmp_path)
