"""``resilience checkpoint``: what there is, whether it is good, and in another form."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from resilience.__main__ import main
from resilience.checkpoint import digest, encoding, export
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.manifest import Manifest

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


@pytest.mark.parametrize("at", [10, 20, 200])
def test_show_names_the_file_whose_header_is_damaged(home: Path, at: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "show", str(home)]) == 2
    assert f"{path}: the digest of its header is wrong." in capsys.readouterr().err


def test_show_names_the_file_whose_header_was_written_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "step-00000002" / "rank-00000.safetensors"
    manifest = Manifest.from_bytes((path.parent / "manifest.json").read_bytes())
    file = manifest.shards[0]
    data = path.read_bytes()
    head = data[: file.head].replace(b"__metadata__", b"__metabata__")
    path.write_bytes(head + data[file.head :])
    told = replace(file, digests=(digest.digest(head), *file.digests[1:]))
    (path.parent / "manifest.json").write_bytes(replace(manifest, shards=(told,)).as_bytes())
    assert main(["checkpoint", "show", str(home)]) == 2
    assert f"{path}: the header can't be read" in capsys.readouterr().err


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


def test_prune_that_would_keep_every_so_many_less_than_none_removes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "prune", str(home), "--keep", "1", "--keep-every", "-3"]) == 2
    assert "--keep-every=-3: give a number of steps" in capsys.readouterr().err
    assert len(list(home.glob("step-*"))) == 3


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


# -- what torch reads -------------------------------------------------------------------------------------------------


class Trained:
    """A model, an optimizer that has stepped, and a scheduler."""

    def __init__(self, seed: int, steps: int, lr: float = 0.01) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(
            [
                {"params": list(self.model[0].parameters()), "weight_decay": 0.1},
                {"params": [*self.model[1].parameters(), *self.model[2].parameters()]},
            ],
            lr=lr,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 3)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()


@pytest.fixture
def trained() -> Trained:
    return Trained(1, steps=3)


@pytest.fixture
def trained_home(saver_home: Path, tmp_path: Path, trained: Trained) -> Path:
    folder = tmp_path / "checkpoints"
    with FlashCheckpoint(folder, **vars(trained)) as checkpoint:
        checkpoint.save(3)
        checkpoint.wait()
    return folder


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.filterwarnings("ignore:.*single process")
def test_dcp_loads_an_export_into_the_state_of_another_model_and_optimizer(
    trained_home: Path, tmp_path: Path, trained: Trained
) -> None:
    assert main(["checkpoint", "export", str(trained_home), str(tmp_path / "dcp")]) == 0
    other = Trained(2, steps=1, lr=0.5)
    model_state, optimizer_state = get_state_dict(other.model, other.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": other.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other.scheduler.load_state_dict(state["scheduler"])
    for name, thing in vars(trained).items():
        assert_same(dict(getattr(other, name).state_dict()), dict(thing.state_dict()))
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert other.optimizer.state[other.model[2].weight]["exp_avg"].abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*single process")
def test_dcp_export_has_the_keys_that_torch_itself_would_write(
    trained_home: Path, tmp_path: Path, trained: Trained
) -> None:
    assert main(["checkpoint", "export", str(trained_home), str(tmp_path / "ours")]) == 0
    model_state, optimizer_state = get_state_dict(trained.model, trained.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": trained.scheduler.state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    assert sorted(ours.state_dict_metadata) == sorted(theirs.state_dict_metadata)
    assert "optimizer.state.0.weight.exp_avg" in ours.state_dict_metadata


def test_torch_export_can_be_loaded_by_all_parts(trained_home: Path, tmp_path: Path, trained: Trained) -> None:
    assert main(["checkpoint", "export", str(trained_home), str(tmp_path / "x.pt")]) == 0
    other, state = Trained(2, steps=1, lr=0.5), torch.load(tmp_path / "x.pt")
    for name, thing in vars(trained).items():
        getattr(other, name).load_state_dict(state[name])
        assert_same(dict(getattr(other, name).state_dict()), dict(thing.state_dict()))


def optimizer_of(*names: str) -> dict[str, Any]:
    return {"state": {name: {"step": 1} for name in names}, "param_groups": [{"lr": 1.0, "params": list(names)}]}


def test_optimizer_of_one_module_is_exported_with_the_names_that_the_module_uses() -> None:
    state: dict[str, Any] = {"model": {}, "head": {}, "model.head": {}}

    def exported(*names: str) -> Any:
        return export.as_torch_has_it({**optimizer_of(*names), "kind": "torch.optim.Adam"}, state)

    assert exported("model.0.weight", "model.model.bias") == optimizer_of("0.weight", "model.bias")
    assert exported("model.head.weight") == optimizer_of("weight")
    assert exported("model.0.weight", "head.weight") == optimizer_of("model.0.weight", "head.weight"), "of two modules"
    assert exported("model.0.weight", "#1") == optimizer_of("model.0.weight", "#1"), "of no module"
    assert exported() == optimizer_of()


@pytest.mark.parametrize(
    "part",
    [
        5,
        {},
        {"state": {}},
        {"state": 1, "param_groups": []},
        {"state": {}, "param_groups": [1]},
        {"state": {}, "param_groups": [{"params": [["a"]]}]},
    ],
    ids=repr,
)
def test_what_is_no_optimizers_state_is_exported_as_it_is(part: Any) -> None:
    assert export.as_torch_has_it(part, {"model": {"weight": 0}}) is part


# -- values that need code of the training script ---------------------------------------------------------------------


class Word:
    def __init__(self, text: str) -> None:
        self.text = text


@pytest.fixture
def needy(saver_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint with values that a codec and an enum of a module stand for; neither is here any more."""
    (tmp_path / "my_codecs.py").write_text(
        "import enum\n"
        "from resilience.checkpoint.encoding import register_codec\n"
        "from tests.checkpoint.test_cli import Word\n"
        "class Mood(enum.Enum):\n    GOOD = 1\n"
        "register_codec(Word, lambda word: word.text, Word, 'word')\n"
        "register_codec(slice, lambda one: one.stop, slice, 'tensor')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encoding, "_codecs", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    export.import_all(["my_codecs"])
    mood: type[enum.Enum] = sys.modules["my_codecs"].Mood
    state = {"m": torch.arange(3.0), "word": Word("hello"), "mood": mood["GOOD"], "both": slice(torch.ones(2))}
    with FlashCheckpoint(tmp_path / "checkpoints") as checkpoint:
        checkpoint.save_state(1, state)
        checkpoint.wait()
    monkeypatch.setattr(encoding, "_codecs", {})
    del sys.modules["my_codecs"]
    yield tmp_path / "checkpoints"
    sys.modules.pop("my_codecs", None)


def test_safetensors_export_needs_no_codec(needy: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "export", str(needy), str(tmp_path / "x.safetensors")]) == 0
    tensors = load_file(tmp_path / "x.safetensors")
    assert torch.equal(tensors.pop("state.m"), torch.arange(3.0))
    assert [tensor.tolist() for tensor in tensors.values()] == [[1.0, 1.0]]


def test_show_needs_no_codec(needy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(needy)]) == 0
    out = capsys.readouterr().out
    assert "<made by the codec 'word'>" in out
    assert "<made by the codec 'tensor'>" in out
    assert "<my_codecs.Mood.GOOD>" in out


@pytest.mark.parametrize("name", ["x.pt", "dcp"])
def test_export_imports_the_module_that_it_is_given_and_says_so_where_it_is_not(
    needy: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(needy), str(tmp_path / name)]) == 2
    assert "--import" in capsys.readouterr().err
    assert not (tmp_path / name).exists()
    assert "my_codecs" not in sys.modules
    assert main(["checkpoint", "export", str(needy), str(tmp_path / name), "--import", "my_codecs"]) == 0
    if name == "x.pt":
        state = torch.load(tmp_path / name, weights_only=False)["state"]
        assert (state["word"].text, state["mood"].name) == ("hello", "GOOD")
        assert state["both"].stop.tolist() == [1.0, 1.0]


def test_module_that_can_not_be_imported_is_said_and_nothing_is_written(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", "export", str(home), str(tmp_path / "x.pt"), "--import", "no_such_module"]
    assert main(words) == 2
    assert "--import=no_such_module: ModuleNotFoundError" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


# -- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_exported_files_follow_the_umask(home: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for name in ("a.pt", "a.safetensors", "folder"):
            assert main(["checkpoint", "export", str(home), str(tmp_path / name)]) == 0
    finally:
        os.umask(before)
    files = [tmp_path / "a.pt", tmp_path / "a.safetensors", *(tmp_path / "folder").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "folder"])
def test_export_of_a_damaged_checkpoint_leaves_nothing(
    home: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "export", str(home), str(tmp_path / name)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_state_that_torch_can_not_write_is_said_and_leaves_nothing(
    saver_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FlashCheckpoint(tmp_path / "checkpoints") as checkpoint:
        checkpoint.save_state(1, {"a": {"b": 1}, "a.b": 2})
        checkpoint.wait()
    assert main(["checkpoint", "export", str(tmp_path / "checkpoints"), str(tmp_path / "dcp")]) == 2
    said = capsys.readouterr().err
    assert "torch can't write this state" in said
    assert "state.a.b" in said
    assert not (tmp_path / "dcp").exists()


def test_target_in_a_folder_that_is_not_there_is_said(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(home), str(tmp_path / "no" / "x.pt")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["list", "show", "verify", "export", "prune", "--help"])
def test_command_whose_reader_is_gone_ends_quietly(home: Path, tmp_path: Path, words: str) -> None:
    more = {"export": [str(tmp_path / "x.pt")], "prune": ["--keep", "1"]}.get(words, [])
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "resilience", "checkpoint", words, str(home), *more],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert words != "export" or torch.load(tmp_path / "x.pt")["model"]
    assert words != "prune" or len(list(home.glob("step-*"))) == 1
