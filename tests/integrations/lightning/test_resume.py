"""A training that was interrupted anywhere goes on between the same two batches, and ends bit for bit as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.lightning.training import Counting, Crash, Outcome, Rows, StopAfter, trained

pytestmark = pytest.mark.spawns  # savers
LONG, RARE = pytest.mark.long, pytest.mark.rare
_kept: dict[str, Outcome] = {}


def undisturbed(folder: Path, **settings: Any) -> Outcome:
    """How it ends when nothing happens; once for all tests that train the same."""
    key = repr(sorted(settings.items()))
    if key not in _kept:
        _kept[key] = trained(folder / "straight", **settings)
    return _kept[key]


def resumed(folder: Path, crash_at: int, **settings: Any) -> Outcome:
    """Train until it crashes, and once more."""
    rows = Rows()
    with pytest.raises(Crash):
        trained(folder / "broken", crash_at=crash_at, rows=rows, **settings)
    return trained(folder / "broken", rows=rows, **settings)


@pytest.mark.parametrize("crash_at", [3, 8, pytest.param(9, marks=LONG), pytest.param(21, marks=RARE)])
def test_training_that_crashed_in_any_batch_of_an_epoch_ends_as_one_that_did_not(tmp_path: Path, crash_at: int) -> None:
    assert resumed(tmp_path, crash_at) == undisturbed(tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        "workers",
        "noisy",
        "stateful",
        "own batches",
        *(pytest.param(kind, marks=LONG) for kind in ("generator", "endless")),
        *(pytest.param(kind, marks=RARE) for kind in ("stream", "replacement", "sized stream")),
    ],
)
@pytest.mark.parametrize("crash_at", [pytest.param(5, marks=RARE), 13])
def test_every_kind_of_loader_is_at_the_right_batch_again(tmp_path: Path, kind: str, crash_at: int) -> None:
    assert resumed(tmp_path, crash_at, kind=kind) == undisturbed(tmp_path, kind=kind)


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 3},
        {"accumulate_grad_batches": 3},
        pytest.param({"max_steps": 19, "max_epochs": -1}, marks=LONG),
        pytest.param({"limit_train_batches": 5}, marks=RARE),
        pytest.param({"limit_val_batches": 0, "max_epochs": 2}, marks=RARE),
        pytest.param({"check_val_every_n_epoch": 2}, marks=RARE),
        pytest.param({"manual": True}, marks=LONG),
        pytest.param({"log_every_n_steps": 4, "gradient_clip_val": 0.5}, marks=RARE),
    ],
    ids=",".join,
)
def test_whatever_the_trainer_is_told_it_goes_on_in_the_same_way(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert resumed(tmp_path, 11, **settings) == undisturbed(tmp_path, **settings)


def test_what_hooks_do_when_an_epoch_begins_is_done_once(tmp_path: Path) -> None:
    assert resumed(tmp_path, 11, module=Counting) == undisturbed(tmp_path, module=Counting)


def test_training_that_somebody_wants_to_stop_stops_at_the_same_step(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"also": (StopAfter(9),), "min_steps": 14}
    straight = undisturbed(tmp_path, **settings)
    assert straight.counts["global_step"] < 24, "else this test can't fail"
    assert resumed(tmp_path, 11, **settings) == straight
    assert trained(tmp_path / "broken", **settings).counts == straight.counts, "it is over, and stays so"
