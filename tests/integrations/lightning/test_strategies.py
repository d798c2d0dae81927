"""Strategies: what each rank has after a kill is what it has without, whoever shards the model; and what no CPU can try."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, job

pytestmark = pytest.mark.spawns
SCRIPT = str(WORKLOADS / "lightning_strategies.py")
TWO = ["--nproc-per-node=2", "--max-restarts=2"]


def ends(folder: Path, kind: str, env: dict[str, str]) -> tuple[list[str], str]:
    """Train; return what each rank had at the end, and the log."""
    with job(folder / "job", TWO, [SCRIPT, kind, str(folder / "out")], {"STATE": "sharded", **env}) as it:
        assert it.wait(150) == 0, it.log()
        it.assert_nothing_left()
        return [(folder / "out" / f"final_{rank}").read_text() for rank in range(2)], it.log()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("model_parallel", marks=pytest.mark.long),
        *(pytest.param(kind, marks=pytest.mark.rare) for kind in ("ddp", "fsdp")),
    ],
)
def test_sharded_or_not_a_kill_in_the_middle_of_an_epoch_changes_nothing(tmp_path: Path, kind: str) -> None:
    straight, _ = ends(tmp_path / "straight", kind, {})
    broken, log = ends(tmp_path / "broken", kind, {"RESILIENCE_SIMULATED_FAULT": "kill:rank=1,step=17"})
    (step,) = re.findall(r"the job goes on from step (\d+) \(memory\)", log)
    assert 12 <= int(step) <= 16  # of twelve steps in an epoch
    assert broken == straight
    assert (straight[0] != straight[1]) or kind == "ddp", "each has its own shards"


@pytest.mark.parametrize("kind", ["ddp", "model_parallel"])
@pytest.mark.rare
def test_snapshot_of_this_job_counts_more_than_the_checkpoint_that_the_script_begins_with(
    tmp_path: Path, kind: str
) -> None:
    ends(tmp_path, kind, {})
    (begin,) = (tmp_path / "out" / "saved").glob("*step=5.ckpt")
    env = {"CKPT": str(begin), "RESILIENCE_SIMULATED_FAULT": "kill:rank=0,step=17"}
    once, _ = ends(tmp_path / "once", kind, {"CKPT": str(begin)})
    broken, log = ends(tmp_path / "broken", kind, env)
    (step,) = set(re.findall(r"the job goes on from step (\d+) \(memory\)", log))  # twice, where it is loaded late
    assert 12 <= int(step) <= 16
    assert broken == once


def test_lightnings_fsdp_strategy_takes_no_cpu_which_is_why_it_is_tried_with_a_stand_in() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy

    with pytest.raises((ValueError, pl.utilities.exceptions.MisconfigurationException), match="GPU"):
        pl.Trainer(accelerator="cpu", strategy=FSDPStrategy(), devices=1)
