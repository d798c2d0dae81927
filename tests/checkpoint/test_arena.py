"""Slot memory: it grows, never shrinks, is seen by whoever maps it, and is not handed to forked children."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.checkpoint import arena
from resilience.checkpoint.arena import Slot

MEGABYTE = 1 << 20


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.create(3 * MEGABYTE)
    yield made
    made.close()


def pages_in_place(nbytes: int, fd: int) -> int:
    """How many pages of a memfd are allocated."""
    return os.fstat(fd).st_blocks * 512 // mmap.PAGESIZE if nbytes else 0


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, MEGABYTE + 1])
def test_slot_holds_at_least_what_was_asked_for_with_every_page_in_place(nbytes: int) -> None:
    made = Slot.create(nbytes)
    try:
        assert made.nbytes >= max(nbytes, mmap.PAGESIZE)
        assert made.nbytes % mmap.PAGESIZE == 0
        assert len(made.map) == made.nbytes == os.fstat(made.fd).st_size
        assert pages_in_place(made.nbytes, made.fd) == made.nbytes // mmap.PAGESIZE
    finally:
        made.close()


def test_older_kernel_puts_every_page_in_place_too_and_forks_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 9999)  # an advice that no kernel knows
    made = Slot.create(MEGABYTE)
    try:
        assert pages_in_place(made.nbytes, made.fd) == made.nbytes // mmap.PAGESIZE
        assert "dc" in flags_of_mapping("resilience-slot")
    finally:
        made.close()


def flags_of_mapping(name: str) -> list[str]:
    """The kernel's flags of the first mapping of that name (``dc``: not copied on fork)."""
    rows = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, row in enumerate(rows) if name in row)
    return next(row for row in rows[at:] if row.startswith("VmFlags:")).split()[1:]


def test_slot_that_has_grown_keeps_its_contents(slot: Slot) -> None:
    before = slot.nbytes
    slot.map[:5] = b"first"
    slot.map[before - 4 : before] = b"last"
    slot.grow(before + 1)
    assert slot.nbytes >= (before + 1) * 5 // 4
    assert len(slot.map) == slot.nbytes
    assert slot.map[:5] == b"first"
    assert slot.map[before - 4 : before] == b"last"
    assert slot.map[before:] == bytes(slot.nbytes - before)
    assert pages_in_place(slot.nbytes, slot.fd) == slot.nbytes // mmap.PAGESIZE


def test_slot_that_is_asked_to_grow_to_less_stays_as_it_is(slot: Slot) -> None:
    before = slot.nbytes
    slot.map[:5] = b"first"
    slot.grow(1)
    assert slot.nbytes == before == len(slot.map)
    assert slot.map[:5] == b"first"


def test_slot_that_could_not_grow_is_as_it_was(slot: Slot) -> None:
    before = slot.nbytes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MEGABYTE, hard))
    try:
        with pytest.raises(OSError) as caught:
            slot.grow(100 * MEGABYTE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert slot.nbytes == before == len(slot.map)
    slot.grow(before + 1)
    assert slot.nbytes > before


@pytest.mark.parametrize("writable", [True, False])
def test_second_mapping_sees_what_is_written_and_follows_when_it_grows(slot: Slot, writable: bool) -> None:
    other = Slot(os.dup(slot.fd), writable=writable)
    try:
        slot.map[10:15] = b"hello"
        assert other.map[10:15] == b"hello"
        slot.grow(2 * slot.nbytes)
        end = slot.nbytes
        slot.map[end - 3 : end] = b"end"
        assert other.nbytes < end
        other.refresh()
        assert other.nbytes == end
        assert other.map[end - 3 : end] == b"end"
    finally:
        other.close()


def test_mapping_for_reading_can_not_write(slot: Slot) -> None:
    other = Slot(os.dup(slot.fd), writable=False)
    try:
        with pytest.raises(TypeError, match=r"read-?only"):
            other.map[0] = 1
    finally:
        other.close()


@pytest.mark.parametrize("nbytes", [0, 4096])
def test_slot_can_not_be_cut_short_by_anybody(slot: Slot, nbytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(slot.fd, nbytes)


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_slot_for_which_there_is_no_room_leaves_no_descriptor_behind() -> None:
    before = descriptors()
    with pytest.raises((OSError, OverflowError)):
        Slot.create(1 << 62)
    assert descriptors() == before


def test_closing_does_not_pull_the_memory_from_under_a_view() -> None:
    made = Slot.create(1)
    made.map[:4] = b"here"
    view = memoryview(made.map)
    made.close()
    assert bytes(view[:4]) == b"here"
    with pytest.raises(OSError):
        os.fstat(made.fd)


_FORK = """
import os, sys
from pathlib import Path
from resilience.checkpoint.arena import Slot

slot = Slot.create(1 << 20)
other = Slot(os.dup(slot.fd), writable=False)
named = b"resilience-slot"
assert Path("/proc/self/maps").read_bytes().count(named) == 2
child = os.fork()
if child == 0:
    os._exit(40 + Path("/proc/self/maps").read_bytes().count(named))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.spawns
def test_forked_child_does_not_have_it_mapped() -> None:
    repo = Path(arena.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _FORK], cwd=repo, timeout=60, check=False)
    assert done.returncode == 40


_LET_GO = """
import gc, mmap, os, sys
from resilience.checkpoint.arena import Slot, forget_slots

slot, grown, left = Slot.create(1 << 20), Slot.create(1 << 20), Slot.create(1 << 20)
stale = memoryview(grown.map)
grown.grow(1 << 21)  # the old mapping lives on in the view
view = memoryview(left.map)
left.close()  # so does this one
other = os.memfd_create("other")
os.ftruncate(other, 4096)
room = mmap.mmap(other, 4096)
mine = os.memfd_create("mine")
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
forget_slots([(other, room)])
forget_slots()  # as in a child of the child
names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
assert not [name for name in names if "resilience-slot" in name or "other" in name], names
os.fstat(mine)
own = [mmap.mmap(-1, 1 << 20) for _ in range(8)]  # at the addresses of the slots, as likely as not
for number in range(3, 30):
    os.dup2(mine, number)  # and at the numbers of their descriptors
del slot, grown, left, stale, view, room
gc.collect()
for memory in own:
    memory[:] = bytes(1 << 20)
for number in range(3, 30):
    os.fstat(number)
"""


@pytest.mark.spawns
def test_forked_child_that_lets_go_of_it_has_no_descriptor_and_keeps_what_it_has_in_its_place() -> None:
    repo = Path(arena.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _LET_GO], cwd=repo, timeout=60, check=False)
    assert done.returncode == 0  # also of the interpreter's own end, which lets go of all objects
