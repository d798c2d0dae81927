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

# One process is what is meant.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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


# -- parts, and what they are called ----------------------------------------------------------------------------------


def weights() -> dict[str, Any]:
    return {"weight": torch.ones(2, 3), "bias": torch.ones(2)}


def test_parts_have_the_names_that_they_are_given() -> None:
    found = {"model": {"a": 1}, "optim": {"b": 2}, "epoch": 7}
    assert foreign.named(found, {"optim": "optimizer", "epoch": ""}) == {"model": {"a": 1}, "optimizer": {"b": 2}}
    assert foreign.named(found, {"model": "optim", "optim": "model", "epoch": ""}) == {
        "optim": {"a": 1},
        "model": {"b": 2},
    }
    assert foreign.named(found, {"": "all"}) == {"all": found}


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ({"ema": "model"}, r"the parts 'model' and 'ema' would both be called 'model'\. Give one of them another name"),
        ({"ema": "net", "model": "net"}, r"would both be called 'net'.*--name 'ema='\."),
        ({"emma": "ema"}, r"no such part\. Did you mean 'ema'\? There is 'ema', 'model'\."),
        ({"model": "rng"}, r"'rng' is an argument of FlashCheckpoint.*--name model=their_rng.*--name 'model='"),
        ({"model": "my model"}, r"'my model' is no name of a part.*--name 'model=model'.*--name =model"),
        ({"": "model", "ema": "other"}, "takes everything as one part"),
        ({"": ""}, "takes everything as one part"),
        ({"": "rng"}, "another name, --name =their_rng[.]$"),
        ({"model": "", "ema": ""}, "no part in it to take over"),
    ],
    ids=repr,
)
def test_names_that_can_not_be_meant_are_refused_in_words(names: dict[str, str], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        foreign.named({"model": weights(), "ema": weights()}, names)


@pytest.mark.parametrize("name", ["rng", "directory", "self", "replicated", "mode", "disk_every", "restore_timeout"])
def test_part_that_is_called_as_an_argument_of_ours_needs_another_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "theirs.pt"
    torch.save({"model": weights(), name: [1, 2]}, path)
    with pytest.raises(CheckpointError, match=rf"theirs\.pt: '{name}' is an argument.*Nothing was written\.$"):
        cli.main(["import", str(tmp_path / "ours"), str(path), "--step=1"])
    assert not (tmp_path / "ours").exists()


@pytest.mark.spawns
def test_part_that_is_called_as_an_argument_of_ours_is_taken_over_under_the_name_that_is_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": weights(), "rng": [1, 2]}, tmp_path / "theirs.pt")
    ours = str(tmp_path / "ours")
    assert cli.main(["import", ours, str(tmp_path / "theirs.pt"), "--step=1", "--name", "rng=their_rng"]) == 0
    assert cli.main(["show", ours]) == 0
    assert "their_rng  [1, 2]" in capsys.readouterr().out


def test_name_that_is_given_twice_for_one_part_is_refused(tmp_path: Path) -> None:
    torch.save({"model": weights()}, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match="given twice"):
        cli.main(["import", str(tmp_path), str(tmp_path / "theirs.pt"), "--step=1", "--name=model=a", "--name=model=b"])


def bare(path: Path, form: str) -> Path:
    """Write the state of a model alone, without the name of a part."""
    state = trained(0)[0].state_dict()
    if form == "dcp":
        dcp.save(state, checkpoint_id=str(path), no_dist=True)
    elif form == "torch":
        torch.save(state, path)
    else:
        safetensors.torch.save_file(dict(state), path)
    return path


@pytest.mark.spawns
@pytest.mark.parametrize(("form", "name"), [("dcp", "theirs"), ("torch", "theirs.pt"), ("flat", "theirs.safetensors")])
def test_bare_state_of_a_model_is_refused_until_it_is_given_a_name(tmp_path: Path, form: str, name: str) -> None:
    words = ["import", str(tmp_path / "ours"), str(bare(tmp_path / name, form)), "--step=41"]
    with pytest.raises(CheckpointError, match="If all of it is the state of one model, take it as that, --name =model"):
        cli.main(words)
    assert not (tmp_path / "ours").exists()
    assert cli.main([*words, "--name", "=model"]) == 0
    model, _ = trained(1)
    with resilience.FlashCheckpoint(tmp_path / "ours", model=model) as checkpoint:
        assert checkpoint.restore() == 42
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), trained(0)[0].parameters(), strict=True))


def test_tensors_of_a_safetensors_file_that_belong_to_no_part_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file(weights(), path)
    with pytest.raises(CheckpointError, match=r"'(bias|weight)' is a tensor"):
        cli.main(["import", str(tmp_path / "ours"), str(path), "--step=1"])
    safetensors.torch.save_file({"model": torch.ones(1), "model.weight": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="'model' is a tensor, and the name of a part too"):
        foreign.read(path)
    assert foreign.read(path, flat=True).keys() == {"model", "model.weight"}


@pytest.mark.parametrize(
    "part",
    [
        {"state": {}, "param_groups": 7},
        {"state": 5, "param_groups": []},
        {"state": {}, "param_groups": [{"lr": 1}]},
        {"state": {}, "param_groups": [{"params": 1}]},
        {"state": {}, "param_groups": [{"params": [["a"]]}]},
        {"state": {}, "param_groups": [3]},
    ],
    ids=repr,
)
def test_what_is_no_optimizers_state_is_taken_over_as_it_is(part: Any) -> None:
    assert foreign.as_we_have_it(part, {"model": weights()}) is part


@pytest.mark.spawns
def test_what_is_no_optimizers_state_is_not_restored_into_one(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    odd = {"state": {}, "param_groups": [{"lr": 1}]}
    torch.save({"model": model.state_dict(), "optimizer": odd}, tmp_path / "theirs.pt")
    assert cli.main(["import", str(tmp_path / "ours"), str(tmp_path / "theirs.pt"), "--step=1"]) == 0
    with (
        resilience.FlashCheckpoint(tmp_path / "ours", model=model, optimizer=optimizer) as checkpoint,
        pytest.raises(CheckpointError, match="optimizer: what was saved is no optimizer's state"),
    ):
        checkpoint.restore()


@pytest.mark.spawns
def test_optimizers_state_with_numbers_for_parameters_is_restored_in_their_order(tmp_path: Path) -> None:
    """As ``torch.save`` of a plain ``optimizer.state_dict()`` has it, which nearly every script writes."""
    model, optimizer = trained(0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "theirs.pt")
    arguments = ["import", str(tmp_path / "ours"), str(tmp_path / "theirs.pt"), "--step=1", "--name", "epoch="]
    assert cli.main(arguments) == 0
    other, its_optimizer = trained(1)
    with resilience.FlashCheckpoint(tmp_path / "ours", model=other, optimizer=its_optimizer) as checkpoint:
        checkpoint.restore()
    before, after = optimizer.state_dict(), its_optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for number, entry in before["state"].items():
        assert all(torch.equal(torch.as_tensor(value), after["state"][number][key]) for key, value in entry.items())


@pytest.mark.spawns
def test_optimizers_state_with_another_number_of_parameters_is_refused_in_words(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    fewer = torch.optim.AdamW(list(model.parameters())[:1])
    torch.save({"model": model.state_dict(), "optimizer": fewer.state_dict()}, tmp_path / "theirs.pt")
    assert cli.main(["import", str(tmp_path / "ours"), str(tmp_path / "theirs.pt"), "--step=1"]) == 0
    with (
        resilience.FlashCheckpoint(tmp_path / "ours", model=model, optimizer=optimizer) as checkpoint,
        pytest.raises(CheckpointError, match="parameters in the checkpoint that are not the optimizer's: 0"),
    ):
        checkpoint.restore()


# -- what is damaged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("description", [b"junk", b"", pickle.dumps(5), pickle.dumps({"a": 1})], ids=repr)
def test_damaged_description_is_said_without_a_traceback(
    tmp_path: Path, description: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = as_dcp(tmp_path / "theirs")
    (path / ".metadata").write_bytes(description)
    caplog.clear()
    with pytest.raises(CheckpointError, match=r"theirs.*can't be read: .*(damaged|EOFError|no checkpoint)"):
        foreign.read(path)
    assert not caplog.records


def test_advice_to_run_what_is_in_a_file_is_not_passed_on(tmp_path: Path) -> None:
    EVIDENCE[0] = str(tmp_path / "ran")
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    path = as_dcp(tmp_path / "damaged")
    for file in path.glob("*.distcp"):
        file.write_bytes(bytes(byte ^ 0xFF for byte in file.read_bytes()))
    for damaged, match in ((path, "it is damaged, or"), (tmp_path / "evil.pt", "it asks for ")):
        with pytest.raises(CheckpointError, match=match) as caught:
            foreign.read(damaged)
        assert "weights_only" not in str(caught.value)
        assert "trust" not in str(caught.value)
