"""States that are spread over ranks: killed, restored, and restored by other numbers of ranks in other layouts; real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilience.checkpoint import cli
from resilience.checkpoint.reading import open_disk
from resilience.checkpoint.stores.local import read_manifest
from tests.jobs import WORKLOADS, job

pytestmark = pytest.mark.spawns
SCRIPT = str(WORKLOADS / "sharded_flash.py")
STEPS = 10


def run(folder: Path, layout: str, ranks: int, *words: str, steps: int = STEPS, **more: str) -> dict[str, list[str]]:
    """Run the training; return what all ranks wrote, by kind."""
    options = [f"--nproc-per-node={ranks}", "--max-restarts=1"]
    with job(folder, options, [SCRIPT, str(folder / "ck"), str(steps), *words], {"LAYOUT": layout, **more}) as it:
        assert it.wait() == 0, it.log()
        kinds = ("starts", "restored", "final", "rank")
        found = {kind: [(it.progress / f"{kind}_{rank}").read_text() for rank in range(ranks)] for kind in kinds}
        it.assert_nothing_left()
    for kind in ("restored", "final"):
        assert len(set(found[kind])) == 1, "all ranks see the same whole state"
    return found


KILLED = [
    ("fsdp2", 2, "blocking"),
    pytest.param("fsdp2", 2, "overlap", marks=pytest.mark.rare, id="fsdp2-overlap"),
    pytest.param("fsdp2", 3, "blocking", marks=pytest.mark.rare, id="fsdp2-3"),
    pytest.param("hsdp", 4, "blocking", marks=pytest.mark.rare, id="hsdp"),
    pytest.param("hsdp", 4, "overlap", marks=pytest.mark.rare, id="hsdp-overlap"),
    pytest.param("fsdp1", 2, "blocking", marks=pytest.mark.long, id="fsdp1"),
    pytest.param("fsdp1", 2, "overlap", marks=pytest.mark.rare, id="fsdp1-overlap"),
    pytest.param("fsdp1-flat", 2, "blocking", marks=pytest.mark.rare, id="fsdp1-flat"),
    pytest.param("fsdp1-mesh", 2, "blocking", marks=pytest.mark.rare, id="fsdp1-mesh"),
]


@pytest.mark.parametrize(("layout", "ranks", "mode"), KILLED)
def test_training_with_a_rank_killed_ends_bit_for_bit_like_one_without(
    tmp_path: Path, layout: str, ranks: int, mode: str
) -> None:
    undisturbed = run(tmp_path / "undisturbed", layout, ranks, MODE=mode)
    killed = run(tmp_path / "killed", layout, ranks, "kill", "1", "6", MODE=mode)
    assert killed["starts"] == ["0\n7\n"] * ranks
    assert killed["final"] == undisturbed["final"]
    assert killed["rank"] == undisturbed["rank"], "buffers, schedule and random numbers of each rank"


ONWARD = [("hsdp", 4, "fsdp2", 3)]
RARELY = [
    ("fsdp1", 3, "fsdp2", 2),
    ("fsdp2", 2, "fsdp2", 3),
    ("ddp", 2, "fsdp2", 1),
    ("fsdp2", 2, "plain", 1),
    ("fsdp2", 2, "fsdp2", 8),
    ("fsdp2", 3, "ddp", 2),
    ("fsdp2", 1, "fsdp2", 2),
    ("ddp", 3, "hsdp", 4),
    ("plain", 1, "fsdp1", 2),
    ("fsdp1-mesh", 2, "ddp", 3),
]


@pytest.mark.parametrize(
    ("layout", "ranks", "then", "of"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in ONWARD),
        *(pytest.param(*case, marks=pytest.mark.rare) for case in RARELY),
    ],
)
def test_what_some_ranks_saved_other_ranks_in_another_layout_restore(
    tmp_path: Path, layout: str, ranks: int, then: str, of: int
) -> None:
    saved = run(tmp_path / "saved", layout, ranks)
    (tmp_path / "onward").mkdir()
    shutil.copytree(tmp_path / "saved/ck", tmp_path / "onward/ck")
    onward = run(tmp_path / "onward", then, of, steps=STEPS + 2)
    assert onward["starts"] == [f"{STEPS}\n"] * of
    assert onward["restored"] == saved["final"][:1] * of
    assert onward["final"] != onward["restored"], "it trained on"


@pytest.mark.long
def test_training_that_changes_its_number_of_ranks_ends_like_one_that_does_not_where_the_arithmetic_allows_it(
    tmp_path: Path,
) -> None:
    """One rank, then again one rank of FSDP2: nothing is added up in another order."""
    straight = run(tmp_path / "straight", "plain", 1, steps=2 * STEPS)
    run(tmp_path / "there", "plain", 1)
    (tmp_path / "back").mkdir()
    shutil.copytree(tmp_path / "there/ck", tmp_path / "back/ck")
    assert run(tmp_path / "back", "fsdp2", 1, steps=2 * STEPS)["final"] == straight["final"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is what is meant
def test_torchs_own_tools_read_what_fsdp2_saved_and_what_they_saved_is_restored(tmp_path: Path) -> None:
    saved = run(tmp_path / "saved", "fsdp2", 2, DCP=str(tmp_path / "dcp"))
    (folder,) = (tmp_path / "saved/ck").glob("step-*")
    opened = open_disk(folder, read_manifest(folder), 0)
    wanted = {
        name: tensor for name, tensor in opened.source.tensors().items() if name.startswith(("model.", "optimizer."))
    }
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert len(wanted) > 20

    words = ["import", str(tmp_path / "back/ck"), str(tmp_path / "dcp"), f"--step={STEPS - 1}"]
    (tmp_path / "back").mkdir()
    assert cli.main([*words, "--name=optim=optimizer", "--name=epoch="]) == 0
    back = run(tmp_path / "back", "fsdp2", 3, steps=STEPS, IMPORTED="1")
    assert back["starts"] == [f"{STEPS}\n"] * 3
    assert back["restored"] == saved["final"][:1] * 3


DIVIDED = str(WORKLOADS / "divided.py")


def run_divided(
    folder: Path, group: int, ranks: int, *words: str, ends: int = 0, **more: str
) -> tuple[dict[str, list[str]], str]:
    """Run a model that is divided by hand; return what each rank had, by kind, and what was said."""
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={1 - bool(ends)}"]
    with job(folder, options, [DIVIDED, str(folder / "ck"), *words], {"GROUP": str(group), **more}) as it:
        assert it.wait() == ends, it.log()
        kinds = ("restored", "saved")
        files = {kind: [it.progress / f"{kind}_{rank}" for rank in range(ranks)] for kind in kinds}
        found = {kind: [path.read_text() for path in files[kind] if path.exists()] for kind in kinds}
        it.assert_nothing_left()
        return found, it.log()


@pytest.mark.parametrize(
    ("group", "ranks"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.rare), pytest.param(0, 2, marks=pytest.mark.rare)]
)
def test_model_that_is_divided_by_hand_keeps_each_ranks_part_and_another_number_of_ranks_is_refused(
    tmp_path: Path, group: int, ranks: int
) -> None:
    killed, _ = run_divided(tmp_path / "killed", group, ranks, "6", "kill", "1", "5")
    assert killed["restored"] == killed["saved"], "the last step was made, and is not made again"
    assert len(set(killed["restored"])) > 1, "each part is another one"

    shutil.copytree(tmp_path / "killed/ck", tmp_path / "fewer/ck")
    refused, said = run_divided(tmp_path / "fewer", group and 1, 1, "7", ends=1)
    assert refused["restored"] == []
    assert f"it was saved by {ranks} ranks, and here are 1; model had other values on each" in " ".join(said.split())


@pytest.mark.rare
def test_model_that_was_divided_by_hand_goes_on_from_disk_and_with_fewer_ranks_where_that_is_wanted(
    tmp_path: Path,
) -> None:
    saved, _ = run_divided(tmp_path / "saved", 2, 4, "6")
    again, _ = run_divided(tmp_path / "saved", 2, 4, "6")
    assert again["restored"] == saved["saved"]
    fewer, _ = run_divided(tmp_path / "saved", 2, 2, "6", ANY_WORLD="1")
    assert fewer["restored"] == saved["saved"][:2]
