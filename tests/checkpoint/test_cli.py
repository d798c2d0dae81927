"""``resilience checkpoint``: what there is, whether it is good, and in another form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp

from resilience.__main__ import main
from resilience.checkpoint.flash import FlashCheckpoint

pytestmark = pytest.mark.spawns


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.fixture
def home(saver_home: Path, tmp_path: Path, model: nn.Module) -> Path:
    folder = tmp_path / "checkpoints"
    with FlashCheckpoint(folder, model=model, disk_every=1) as checkpoint:
        for step in range(3):
            checkpoint.save(step)
            checkpoint.wait()
    return folder


def test_list_shows_all_newest_first_and_what_is_left_out(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(home)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2", "1", "0"]
    (home / "step-00000002" / "rank-00000.values").unlink()
    assert main(["checkpoint", "list", str(home)]) == 1
    assert "rank-00000.values is missing" in capsys.readouterr().out


def test_nothing_there_is_said_and_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("list", "verify"):
        assert main(["checkpoint", command, str(tmp_path)]) == 1
        assert "there is no checkpoint" in capsys.readouterr().out


def test_verify_finds_a_flipped_byte(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(home)]) == 0
    path = home / "step-00000001" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "verify", str(home)]) == 1
    said = capsys.readouterr().out
    assert "step 1:" in said
    assert said.count("digest is wrong") == 1
    assert main(["checkpoint", "verify", str(home), "--step", "2"]) == 0


def test_show_names_tensors_and_values(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(home), "--step", "1"]) == 0
    said = capsys.readouterr().out
    assert "model.weight  F32 [2, 3]" in said
    assert "step 1, generation" in said


def test_export_in_three_forms_holds_the_same_tensors(
    home: Path, tmp_path: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(home), str(tmp_path / "x.safetensors")]) == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["model.weight"], model.weight)
    assert main(["checkpoint", "export", str(home), str(tmp_path / "x.pt"), "--format", "torch"]) == 0
    assert torch.equal(torch.load(tmp_path / "x.pt")["model"]["bias"], model.bias)
    assert main(["checkpoint", "export", str(home), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    state = {"model.weight": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(state["model.weight"], model.weight)
    capsys.readouterr()
    assert main(["checkpoint", "export", str(home), str(tmp_path / "x.pt"), "--format", "torch"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_prune_keeps_the_newest(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "prune", str(home), "--keep", "1"]) == 0
    assert sorted(path.name for path in home.glob("step-*")) == ["step-00000002"]
    assert main(["checkpoint", "prune", str(home), "--keep", "0"]) == 2
    assert "at least one stays" in capsys.readouterr().err


def test_form_of_an_export_follows_from_the_name(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, form in (("a.pt", "torch"), ("a.safetensors", "safetensors"), ("folder", "dcp")):
        assert main(["checkpoint", "export", str(home), str(tmp_path / name)]) == 0
        assert f"({form})" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(home), str(tmp_path / "a.zip")]) == 2
    assert "Give --format" in capsys.readouterr().err


def test_show_leaves_out_what_nobody_reads(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(home)]) == 0
    out = capsys.readouterr().out
    assert "… 625 in all" in out  # Python's random state
    assert max(map(len, out.splitlines())) < 2000
