"""Staging: the first save finds everything ready, and a slot is known by any descriptor of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resilience.checkpoint import plan
from resilience.checkpoint.arena import Slot
from resilience.checkpoint.ledger import Ledger
from resilience.checkpoint.link import Place
from resilience.checkpoint.plan import OWN, Collected, Plan, make_plan
from resilience.checkpoint.stager import Stager


def state(rows: int = 3) -> Collected:
    return Collected(["a", "b"], [torch.ones(rows, 2), torch.ones(5)], [OWN, OWN])


@pytest.fixture
def stager() -> Iterator[Stager]:
    made = Stager(
        Place(0, 1, 0, 1, 0, "x"), Ledger.create(2, 0, 1), [Slot.create(1 << 14) for _ in range(2)], 1, made_of(state())
    )
    yield made
    made.close()


def made_of(found: Collected) -> Plan:
    return make_plan(found, 0, 1)


def test_first_save_into_any_slot_makes_nothing_that_was_made_before(
    stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it should be there already")

    monkeypatch.setattr(plan, "make_plan", never)
    monkeypatch.setattr(Plan, "targets", never)
    for index in range(2):
        stager.stage(index, index, state(), b"values", disk=False)
        assert stager._slots[index].map[:44] == torch.ones(11).numpy().tobytes()


def test_state_of_another_structure_is_staged_by_its_own_plan(stager: Stager) -> None:
    stager.stage(0, 0, state(4000), b"values", disk=False)  # larger than the slot, too
    assert stager._slots[0].map[: 4 * 8000] == torch.ones(8000).numpy().tobytes()


def test_slot_that_is_too_small_for_the_plan_makes_no_trouble_until_it_is_used() -> None:
    small = Stager(Place(0, 1, 0, 1, 0, "x"), Ledger.create(2, 0, 1), [Slot.create(1)], 1, made_of(state(4000)))
    small.stage(0, 0, state(4000), b"values", disk=False)
    assert small._slots[0].map[: 4 * 8000] == torch.ones(8000).numpy().tobytes()
    small.close()


def test_mapping_is_found_by_any_descriptor_of_its_slot_and_by_no_other(stager: Stager) -> None:
    other = os.memfd_create("other")
    again = os.dup(stager._slots[1].fd)
    try:
        assert stager.mapped(again) is stager._slots[1].map
        assert stager.mapped(other) is None
        os.ftruncate(again, 1 << 15)  # by whoever else has it
        assert stager.mapped(again) is None
    finally:
        os.close(again)
        os.close(other)


_WORKER = """
import gc, os, sys, torch
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.receipt import Level

torch.set_num_threads(1)

def holds():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # that of the listing
            continue
    return [name for name in found if "resilience" in name or name.startswith(("socket:", "anon_inode:[eventfd]"))]

known = set(holds())
checkpoint = FlashCheckpoint(sys.argv[1], model=torch.nn.Linear(1000, 1000), disk_every=None)
receipt = checkpoint.save(0)
checkpoint.wait(level="COMPLETE")
child = os.fork()
if child == 0:
    left = set(holds()) - known
    assert not left, left
    assert receipt.level is Level.COMPLETE  # it can still be read
    grandchild = os.fork()
    if grandchild:
        assert os.waitpid(grandchild, 0)[1] == 0
    mine = [torch.ones(1_000_000) for _ in range(9)]  # where the slots were
    del checkpoint
    gc.collect()
    assert all(int(it.sum()) == 1_000_000 for it in mine)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert checkpoint.wait().level is Level.DURABLE  # its line is still there
assert checkpoint.restore() == 1
checkpoint.save(1)
checkpoint.close()
"""


@pytest.mark.spawns
def test_forked_child_holds_nothing_of_its_parents_and_may_drop_the_checkpoint(
    tmp_path: Path, saver_home: Path
) -> None:
    command = [sys.executable, "-c", _WORKER, str(tmp_path / "checkpoints")]
    env = {**os.environ, "TMPDIR": str(saver_home)}
    repo = Path(plan.__file__).parents[2]
    done = subprocess.run(command, cwd=repo, env=env, timeout=90, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
