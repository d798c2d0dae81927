"""What a user says about copies in the memory of other nodes, what a rank is told of them, and what they take of its memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resilience import FlashCheckpoint
from resilience.checkpoint import coming, slots
from resilience.checkpoint.ledger import L_REPLICATED, Ledger, Seal
from resilience.checkpoint.link import Place
from resilience.checkpoint.options import Replication
from resilience.checkpoint.plan import OWN, SHARED, Collected, make_plan
from resilience.checkpoint.receipt import Level, Receipt
from resilience.checkpoint.slots import COMPLETE, PENDING, VOID, Slot
from resilience.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, 0.0),
        (5e6, 5e6),
        (2_000_000, 2e6),
        ("2GB/s", 2e9),
        ("1.5 MB/s", 1.5e6),
        ("10Gbit/s", 1.25e9),
        ("1GiB/s", 1 << 30),
    ],
)
def test_bandwidth_is_given_in_bytes_or_in_words(given: float | str | None, expected: float) -> None:
    assert Replication.of(1, None, given, None).bandwidth == expected


@pytest.mark.parametrize(
    "given", ["fast", "2GB", "GB/s", "1.2.3GB/s", 10, -1.0, True, float("inf"), float("nan"), "1kB/s"]
)
def test_bandwidth_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r'replica_bandwidth=.*a text such as "2GB/s"'):
        Replication.of(1, None, given, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": -1}, "replicas=-1: give a whole number from 0 up"),
        ({"replicas": True}, "replicas=True"),
        ({"replica_bandwidth": "1GB/s"}, "replicas=0 sends none"),
        ({"replica_interface": "eth0"}, "replicas=0 sends none"),
        ({"replicas": 1, "slots": 2}, "slots=2 with replicas=1: give 3 or more"),
        ({"replicas": 1, "replica_interface": ""}, "give the name of a network interface"),
        ({"replicas": 1, "replica_interface": 7}, "give the name of a network interface"),
        ({"replica": 1}, "Did you mean 'replicas'"),
    ],
)
def test_what_can_not_be_meant_is_refused_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        FlashCheckpoint(tmp_path / "ck", model=nn.Linear(1, 1), **options)
    assert not (tmp_path / "ck").exists()


@pytest.mark.spawns
def test_job_on_one_node_is_told_that_nothing_is_replicated_and_can_not_wait_for_it(
    tmp_path: Path, saver_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "resilience"):
        checkpoint = FlashCheckpoint(tmp_path / "ck", model=nn.Linear(1, 1), replicas=1, disk_every=None)
    with checkpoint:
        assert "replicas=1: all ranks are on one node, and there is no other to keep copies" in caplog.text
        checkpoint.save(0)
        with pytest.raises(ConfigError, match="nothing is replicated"):
            checkpoint.wait(level=Level.REPLICATED)


def test_four_slots_are_the_default_with_copies_and_three_without() -> None:
    assert (Replication(1).slots(None), Replication().slots(None), Replication(1).slots(5)) == (4, 3, 5)


def test_only_what_is_a_ranks_own_counts_for_the_memory_of_copies(tmp_path: Path) -> None:
    state = Collected(["a", "b"], [torch.zeros(1 << 20), torch.zeros(1 << 18)], [SHARED, OWN])
    place = Place(0, 4, 0, 2, 0, "x")
    parts: Any = ["something"]
    need, own = coming._estimate(make_plan(state, 0, 2), 1000, parts, place, tmp_path)
    assert need > (2 << 20) + (1 << 20)
    assert (1 << 20) <= own < (1 << 20) + (1 << 17)


# -- what a rank is told ------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create(3, rank=1, world=4)
    yield made
    made.close()


def sealed(ledger: Ledger, index: int, step: int) -> Seal:
    ledger.begin(index)
    ledger.seal(index, (1, step, *range(10)), on_disk=False)
    seal = ledger.seal_of(index)
    assert seal is not None
    return seal


def test_newest_replicated_one_is_kept_though_it_is_older_than_the_newest_complete_one(ledger: Ledger) -> None:
    seals = [sealed(ledger, index, step=index) for index in range(3)]
    for seal in seals:
        ledger.decide(seal, COMPLETE)
    ledger.mark_replicated(seals[0])
    assert slots.choose(*ledger.rule_view()) == 1
    ledger.mark_replicated(seals[1])
    assert slots.choose(*ledger.rule_view()) == 0
    found = ledger.replicated()
    assert found is not None
    assert (found.key, found.is_replicated) == ((1, 1), True)


def test_slot_that_is_written_anew_is_not_replicated_any_more(ledger: Ledger) -> None:
    ledger.mark_replicated(sealed(ledger, 0, step=0))
    assert not sealed(ledger, 0, step=5).is_replicated
    assert ledger.replicated() is None


@pytest.mark.parametrize(("back_to", "kept"), [(0, False), (1, True), (2, True), (None, False)])
def test_what_is_replicated_stays_kept_only_if_it_is_not_newer_than_what_is_gone_back_to(
    ledger: Ledger, back_to: int | None, kept: bool
) -> None:
    seals = [sealed(ledger, index, step=index) for index in range(3)]
    ledger.mark_replicated(seals[1])
    ledger.go_back_to(seals[back_to] if back_to is not None else None)
    assert bool(ledger.words[L_REPLICATED]) is kept


def test_slot_that_is_kept_is_not_chosen_and_that_is_said() -> None:
    found = [Slot(1, COMPLETE, kept=True), Slot(2, COMPLETE), Slot(3, PENDING)]
    assert slots.choose(found, 2) is None
    assert "1 the newest that other nodes have copies of" in slots.why_not(found, 2)
    assert slots.choose([Slot(1, COMPLETE, kept=True), Slot(2, VOID)], 1) == 1
    both = [Slot(1, COMPLETE, kept=True), Slot(2, PENDING)]
    assert slots.why_not(both, 1).endswith("1 the newest complete one"), "one slot may be both"


def test_receipt_is_settled_once_it_can_not_change_any_more() -> None:
    now = [(Level.COMPLETE, "")]
    receipt = Receipt(7, lambda: now[0])
    assert not receipt.is_settled
    now[0] = (Level.SKIPPED, "why")
    assert receipt.is_settled
    now[0] = (Level.REPLICATED, "")
    receipt.settle()
    assert receipt.is_settled
