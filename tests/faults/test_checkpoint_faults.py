"""Disks that are full, slow or gone, savers that stop, memory that is too small, clocks that jump, two jobs in one
directory: training goes on, what was durable stays so, and whatever is lost is said.

The savers are real processes. Where a fault can't be made from outside, the saver is started with one built in
(:func:`saver_with`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from resilience.checkpoint import attendant, flash, hire
from resilience.checkpoint.reading import open_disk
from resilience.checkpoint.receipt import Level, Receipt
from resilience.checkpoint.saver import restores
from resilience.checkpoint.stores.claims import DirectoryInUse
from resilience.checkpoint.stores.local import Directory
from resilience.errors import CheckpointError, SaveError
from tests.checkpoint.conftest import saver_home, savers
from tests.jobs import WORKLOADS, Job, command_line, job, stopped, wait_for
from tests.real.test_memory import limited

__all__ = ["saver_home"]
pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class FlashCheckpoint(flash.FlashCheckpoint):
    """One that a test that fails does not leave open."""

    opened: ClassVar[list[flash.FlashCheckpoint]] = []

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.opened.append(self)


@pytest.fixture(autouse=True)
def none_left_open(tmp_path: Path, saver_home: Path) -> Iterator[None]:
    yield
    for checkpoint in FlashCheckpoint.opened:
        checkpoint.__exit__(AssertionError, AssertionError(), None)  # nobody waits
    FlashCheckpoint.opened.clear()


@pytest.fixture
def home(tmp_path: Path, saver_home: Path) -> Path:
    return tmp_path / "checkpoints"


def state(step: int) -> dict[str, Any]:
    """A state that says of which step it is in every number."""
    return {"tensor": torch.full((3000,), float(step)), "values": [step, str(step) * 10]}


def is_of(found: Any, step: int) -> bool:
    return bool(torch.equal(found["tensor"], state(step)["tensor"]) and found["values"] == state(step)["values"])


def steps_in(folder: Path) -> list[int]:
    """The steps that are on disk, newest first; each must be, to the bit, what was saved."""
    found = Directory(folder).stored()
    for item in found:
        try:
            opened = open_disk(item.path, item.manifest, 0)
            assert is_of(opened.source.fresh(opened.values["state"]), item.manifest.step), item.path
            assert opened.check.wrong() == ""
        except (OSError, CheckpointError):
            if item.path.exists():
                raise
            return steps_in(folder)  # it is one of those that need not be kept, and was removed meanwhile
    return [item.manifest.step for item in found]


def failure_of(checkpoint: FlashCheckpoint) -> str:
    """Wait until what failed in the background is raised; return what it says."""
    with pytest.raises(SaveError) as caught:
        wait_for(lambda: checkpoint.wait().level is Level.DURABLE, "something to fail")
    return str(caught.value)


def saver_of(folder: Path) -> int:
    (pid,) = savers(folder)
    return pid


def saver_with(monkeypatch: pytest.MonkeyPatch, fault: str, path: Path) -> None:
    """Have savers begin with some code, which is told a ``path``."""
    told = f"import sys\nsys.argv, path = sys.argv[1:], {str(path)!r}\n"
    boot = f"{told}{fault}\nimport runpy\nrunpy.run_path(sys.argv[0], run_name='__main__')"

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-I", "-S"]
        return subprocess.Popen([*command[:3], "-c", boot, *command[3:]], **options)

    monkeypatch.setattr(hire, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


# -- a disk that takes no more ----------------------------------------------------------------------------------------

_FAILS = """
import json, os, threading
lock, seen = threading.Lock(), {}

def faulty(name, act):
    def attempt(*words, **options):
        with lock:
            try:
                with open(path) as file:
                    order = json.load(file)
            except FileNotFoundError:
                order = {"id": 0, "at": 0}
            begun = order["id"] in seen or (name == "mkdir" and f"{order['id']:08d}" in str(words[0]))
            if not begun:  # what is removed after the save before it
                order = {"id": 0, "at": 0}
            seen[order["id"]] = number = seen.get(order["id"], 0) + 1
            hit = number == order["at"] or order["at"] and order["lasting"] and number > order["at"]
            if hit:
                with open(path + ".hit", "a") as file:
                    file.write(name + "\\n")
        if not hit:
            return act(*words, **options)
        if name == "pwrite":  # half of it gets there
            act(words[0], words[1][: len(words[1]) // 8192 * 4096], words[2])
        raise OSError(order["errno"], os.strerror(order["errno"]))
    return attempt

for name in ("pwrite", "ftruncate", "fsync", "mkdir", "rename", "open"):
    setattr(os, name, faulty(name, getattr(os, name)))
"""


def end_of(checkpoint: FlashCheckpoint, caplog: pytest.LogCaptureFixture, failure: str) -> Level:
    """Wait until the last save is durable, or its failure is told: a wait also ends with that of the second try of one before."""
    return next(
        level
        for level in iter(lambda: checkpoint.wait().level, None)
        if level is Level.DURABLE or re.search(failure, caplog.text)
    )


@pytest.mark.timeout(480)
@pytest.mark.parametrize("lasting", [False, True])
def test_operation_that_fails_wherever_it_is_fails_that_save_in_words_and_harms_no_other(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lasting: bool
) -> None:
    order, hit, partial = tmp_path / "order", tmp_path / "order.hit", tmp_path / "partial"
    saver_with(monkeypatch, _FAILS, order)
    checkpoint = FlashCheckpoint(home, disk_every=1, keep=2, on_save_error="warn", max_failures=1000)
    checkpoint.save_state(0, state(0))
    assert checkpoint.wait().level is Level.DURABLE
    step, durable = 1, 0
    kinds: list[str] = []
    while True:
        number = errno.ENOSPC if step % 4 == 1 else errno.EIO
        partial.write_text(json.dumps({"id": step, "at": len(kinds) + 1, "errno": number, "lasting": lasting}))
        partial.rename(order)
        checkpoint.save_state(step, state(step), wait=60)
        if end_of(checkpoint, caplog, rf"step {step} could not be written .*: {os.strerror(number)}") is Level.DURABLE:
            durable = step
        assert durable in steps_in(home), "what was there before stays, and what is said to be there is"
        order.unlink()
        if not hit.exists():
            break
        kinds.append(hit.read_text().split()[0])
        hit.unlink()
        durable = step + 1
        checkpoint.save_state(durable, state(durable), wait=60)
        assert wait_for(lambda: checkpoint.wait().level is Level.DURABLE, "the next one, which is not its victim")
        assert steps_in(home)[0] == durable
        assert not list(home.glob(".partial-0*"))
        step += 2
    checkpoint.close()
    assert set(kinds) == {"pwrite", "ftruncate", "fsync", "mkdir", "rename", "open"}


def test_file_that_may_not_grow_is_a_failed_save_and_the_next_one_is_written_when_it_may(
    home: Path, saver_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1, on_save_error="warn", max_failures=1000)
    checkpoint.save_state(0, state(0))
    assert checkpoint.wait().level is Level.DURABLE
    pid = saver_of(saver_home)
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    for number, limit in enumerate((0, 100, 4096, 8000)):
        step = 1 + 2 * number
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, most))
        receipt = checkpoint.save_state(step, state(step), wait=60)
        assert end_of(checkpoint, caplog, rf"step {step} could not be written .*File too large") is Level.COMPLETE
        assert receipt.level is Level.COMPLETE, "it is in memory"
        assert is_of(checkpoint.load_state(), step)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        checkpoint.save_state(step + 1, state(step + 1), wait=60)
        wait_for(lambda: checkpoint.wait().level is Level.DURABLE, "the next one")
        assert steps_in(home)[0] == step + 1
        assert not list(home.glob(".partial-0*"))
    checkpoint.close()


def test_full_disk_does_not_keep_a_job_from_passing_over_what_two_restarts_failed_from(
    home: Path, saver_home: Path
) -> None:
    with FlashCheckpoint(home, disk_every=1) as checkpoint:
        for step in (1, 2):
            checkpoint.save_state(step, state(step), wait=60)
            checkpoint.wait()
    wait_for(lambda: not savers(saver_home), "the saver to end")
    restores.write(Directory(home), {Directory(home).stored()[0].manifest.key: 2})
    checkpoint = FlashCheckpoint(home)
    pid = saver_of(saver_home)
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # Nothing can be noted: neither that it is set aside, nor the try.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
    assert is_of(checkpoint.load_state(), 1)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
    checkpoint.save_state(2, state(2), wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()


# -- a directory that can't be written --------------------------------------------------------------------------------

_UNPRIVILEGED = """
import ctypes, os
ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # root writes everywhere, unless it is without CAP_DAC_OVERRIDE
os.execv(sys.executable, [sys.executable, "-I", "-S", *sys.argv])
"""


@pytest.fixture
def closed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that can be closed for savers, with permissions."""
    saver_with(monkeypatch, _UNPRIVILEGED, home)
    home.mkdir()
    yield home
    home.chmod(0o700)


def test_directory_that_can_not_be_written_is_refused_in_words_before_step_0(closed: Path, saver_home: Path) -> None:
    closed.chmod(0o500)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(str(closed))} can't be used for checkpoints: Permission denied"
    ):
        FlashCheckpoint(closed, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="Permission denied"):
        FlashCheckpoint(closed / "below", model=nn.Linear(1, 1))
    closed.chmod(0o700)
    with FlashCheckpoint(closed) as checkpoint:
        checkpoint.save_state(0, state(0))
    assert steps_in(closed) == [0]


def test_directory_that_becomes_read_only_is_said_and_still_restored_from(closed: Path, saver_home: Path) -> None:
    checkpoint = FlashCheckpoint(closed, disk_every=1)
    checkpoint.save_state(0, state(0))
    assert checkpoint.wait().level is Level.DURABLE
    closed.chmod(0o500)
    receipt = checkpoint.save_state(1, state(1), wait=60)
    assert re.search("step 1 could not be written .*Permission denied", failure_of(checkpoint))
    assert receipt.level is Level.COMPLETE
    with pytest.raises(SaveError, match="step 1 could not be written"):  # leaving has it tried once more
        checkpoint.close()
    wait_for(lambda: not savers(saver_home), "the saver to end")
    assert steps_in(closed) == [0]
    later = FlashCheckpoint(closed, disk_every=1)
    assert is_of(later.load_state(), 0), "what is there can be read"
    closed.chmod(0o700)
    later.save_state(1, state(1), wait=60)
    assert later.wait().level is Level.DURABLE
    later.close()
    assert steps_in(closed) == [1, 0]


# -- a slow disk ------------------------------------------------------------------------------------------------------

_SLOW = """
import os, time

def slow(act):
    def wait(*words):
        while os.path.exists(path):
            time.sleep(0.005)
        return act(*words)
    return wait

os.fsync = slow(os.fsync)
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As long as this file is there, no write of a saver comes to an end."""
    found = tmp_path / "gate"
    saver_with(monkeypatch, _SLOW, found)
    return found


def test_slow_disk_never_blocks_training_and_receipts_say_what_is_not_written(
    home: Path, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    gate.touch()
    first = checkpoint.save_state(0, state(0), disk=True)
    for step in range(1, 200):
        assert checkpoint.save_state(step, state(step), wait=60).level is not Level.SKIPPED, "the other slots are free"
    assert first.level is Level.COMPLETE, "neither overwritten nor durable"
    assert checkpoint.wait(199, Level.COMPLETE).level is Level.COMPLETE
    receipts: list[Receipt] = []

    def full() -> bool:
        step = 200 + len(receipts)
        receipts.append(checkpoint.save_state(step, state(step), disk=True))
        return receipts[-1].reason == "all 3 slots are taken: 3 still being written to disk or sent"

    wait_for(full, "all slots to be written")
    assert receipts[-1].level is Level.SKIPPED
    assert "3 still being written to disk" in caplog.text or "still being written" in receipts[-1].reason
    taken = [receipt for receipt in receipts if receipt.level is not Level.SKIPPED]
    assert steps_in(home) == []
    assert checkpoint.wait(taken[-1].step, timeout=0.05).level is Level.COMPLETE
    gate.unlink()
    wait_for(lambda: {receipt.level for receipt in (first, *taken)} == {Level.DURABLE}, "all of them to be durable")
    assert steps_in(home)[0] == taken[-1].step
    last = checkpoint.save_state(999, state(999), wait=60)
    checkpoint.close()
    assert last.level is Level.DURABLE
    assert steps_in(home)[0] == 999


def test_leaving_a_slow_disk_says_what_is_not_durable_and_the_saver_finishes_it(
    home: Path, gate: Path, saver_home: Path
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    gate.touch()
    checkpoint.save_state(3, state(3))
    assert checkpoint.wait(3, Level.COMPLETE).level is Level.COMPLETE
    with pytest.raises(SaveError, match=r"step 3 is not durable yet \(COMPLETE\); the saver goes on without us"):
        checkpoint.close(timeout=0.05)
    assert steps_in(home) == []
    assert savers(saver_home)
    gate.unlink()
    wait_for(lambda: not savers(saver_home), "the saver to end")
    assert steps_in(home) == [3]


# -- a saver that stands still ----------------------------------------------------------------------------------------


def test_stopped_saver_of_two_ranks_does_not_stop_training_and_catches_up(tmp_path: Path) -> None:
    script = [str(WORKLOADS / "snapshots.py"), str(tmp_path / "ck"), "100000", "16"]
    with job(tmp_path, ["--nproc-per-node=2"], script, {"DISK_EVERY": "5"}) as it:
        it.await_step(0, "complete", 8)
        with stopped(saver_of_job(it)):
            known = [len(it.notes(rank)) for rank in range(2)]
            wait_for(lambda: all(len(it.notes(rank)) > known[rank] + 60 for rank in range(2)), "steps without a saver")
        newest = [newest_step(it, rank) for rank in range(2)]
        wait_for(lambda: all(acknowledged(it, rank, "durable") > newest[rank] for rank in range(2)), "what comes after")
        it.process.send_signal(signal.SIGTERM)
        it.wait()
        assert not any("BAD" in note[1] for rank in range(2) for note in it.notes(rank))
        it.assert_nothing_left()
    found = Directory(tmp_path / "ck").stored()
    assert found[0].manifest.step >= max(acknowledged(it, rank, "durable") for rank in range(2))


def saver_of_job(it: Job) -> int:
    found: list[int] = wait_for(
        lambda: [pid for pid in it.family() if "checkpoint/saver" in command_line(pid)], "the saver"
    )
    return found[0]


def newest_step(it: Job, rank: int) -> int:
    return max(int(note[1][5:]) for note in it.notes(rank) if note[1].startswith("step-"))


def acknowledged(it: Job, rank: int, level: str) -> int:
    """The newest step that a rank was told to have come to a level."""
    return max(
        [int(note[1].partition("-")[2]) for note in it.notes(rank) if note[1].startswith(f"{level}-")], default=-1
    )


@pytest.mark.rare
def test_answer_that_comes_too_late_is_not_taken_for_that_to_another_question(home: Path, saver_home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    checkpoint.save_state(1, state(1))
    checkpoint.wait()
    (home / ".partial-00000002").write_text("in the way")
    checkpoint.save_state(2, state(2), wait=60)
    wait_for(lambda: checkpoint._attendant.failures, "the save to fail")
    with stopped(saver_of(saver_home)), pytest.raises(SaveError, match="the saver can't be asked what"):
        checkpoint.save_state(3, state(3))
    (home / ".partial-00000002").unlink(missing_ok=True)
    assert checkpoint.wait(2).level is Level.DURABLE  # the answer that is on its way says what failed
    assert is_of(checkpoint.load_state(), 2)
    checkpoint.close()
    assert steps_in(home) == [2, 1]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_saves_go_on_while_a_thread_looks_for_another_saver(
    home: Path, saver_home: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(attendant, "_SILENT_NS", 100_000_000)
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(0, state(0))
    checkpoint.wait(level=Level.COMPLETE)
    pid, steps = saver_of(saver_home), iter(range(1, 1_000_000))

    def looking() -> bool:
        step = next(steps)
        checkpoint.save_state(step, state(step))
        return any(thread.name == "resilience-revive" for thread in threading.enumerate())

    os.kill(pid, number)
    try:
        wait_for(looking, "the silence to be noticed")
        wait_for(lambda: not looking() or next(steps) > 300, "saves meanwhile")
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not looking(), "a saver to be there")
    last = next(steps)
    checkpoint.save_state(last, state(last), wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()
    assert steps_in(home)[0] == last


# -- too little memory ------------------------------------------------------------------------------------------------


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Let this process have so much more memory, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def memory_held() -> list[str]:
    """The ledgers and slots that this process holds."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += [name for name in [str(entry.readlink())] if "memfd:resilience" in name]
    return found


def test_slot_that_can_not_be_had_is_an_error_before_step_0_and_gives_back_what_was_taken(home: Path) -> None:
    model = nn.Linear(8 * MIB, 1, bias=False)  # 32 MiB
    before = memory_held()
    FlashCheckpoint(home, disk_every=None).close()  # everything that takes memory once is imported
    with room_for(88 * MIB), pytest.raises((CheckpointError, OSError), match="memory"):
        FlashCheckpoint(home, model=model, disk_every=None)
    assert memory_held() == before
    with FlashCheckpoint(home, model=model, disk_every=None) as checkpoint:
        checkpoint.save(1)
    assert [item.manifest.step for item in Directory(home).stored()] == [1]


def test_state_that_grows_beyond_what_there_is_is_an_error_and_the_step_before_is_still_there(home: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=None)
    checkpoint.save_state(1, state(1))
    checkpoint.wait(level=Level.COMPLETE)
    large = {"x": torch.zeros(16 * MIB)}
    with room_for(32 * MIB), pytest.raises((CheckpointError, OSError), match="memory"):
        checkpoint.save_state(2, large)
    assert is_of(checkpoint.load_state(), 1)
    checkpoint.save_state(3, state(3), wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    assert steps_in(home) == [3]
    checkpoint.save_state(4, large, wait=60)  # there is enough again
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()


_IN_GROUP = """
import sys, torch, resilience
from resilience.checkpoint.memory import NotEnoughMemory
numbers = {100: 100 << 18, 10: 10 << 18}
try:
    resilience.FlashCheckpoint(sys.argv[1], model=torch.nn.Linear(numbers[100], 1, bias=False))
except NotEnoughMemory as error:
    print(error)
with resilience.FlashCheckpoint(sys.argv[1], model=torch.nn.Linear(numbers[10], 1, bias=False)) as checkpoint:
    checkpoint.save(1)
"""


@pytest.mark.root
def test_control_group_that_is_too_small_is_said_with_its_figures_and_nobody_is_killed(home: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("control groups need root: left out are their limits")
    with limited(450 * MIB) as group:
        inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        script = [sys.executable, "-c", _IN_GROUP, str(home)]
        done = subprocess.run([*inside, *script], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"needs 0\.3\d GB for 3 slots .*the control group \(0\.47 GB\) has 0\.\d\d GB left", done.stdout)
    assert [item.manifest.step for item in Directory(home).stored()] == [1]


# -- a directory that goes away ---------------------------------------------------------------------------------------


def test_directory_that_is_removed_in_the_middle_of_a_write_fails_that_save_and_is_made_again(
    home: Path, gate: Path
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    gate.touch()
    checkpoint.save_state(1, state(1), wait=60)
    wait_for(lambda: list(home.glob(".partial*/rank-00000.safetensors")), "the write to begin")
    shutil.rmtree(home)
    gate.unlink()
    assert re.search("step 1 could not be written .*No such file or directory", failure_of(checkpoint))
    assert is_of(checkpoint.load_state(), 1), "it is in memory"
    checkpoint.save_state(2, state(2), wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()
    assert steps_in(home)[0] == 2


def test_directory_that_was_removed_or_moved_away_still_belongs_to_its_job(home: Path, tmp_path: Path) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    for step, how in ((1, "removed"), (2, "moved")):
        checkpoint.save_state(2 * step, state(2 * step), wait=60)
        assert checkpoint.wait().level is Level.DURABLE
        if how == "removed":
            shutil.rmtree(home)
        else:
            home.rename(tmp_path / "moved")
        checkpoint.save_state(2 * step + 1, state(2 * step + 1), wait=60)
        assert checkpoint.wait().level is Level.DURABLE
        with pytest.raises(DirectoryInUse, match="another job writes its checkpoints here"):
            Directory(home).claim("another")
    checkpoint.close()
    assert steps_in(home) == [5]
    assert steps_in(tmp_path / "moved") == [4, 3]


@pytest.mark.parametrize("holder", ["this-run", "another"])
def test_earlier_life_of_a_single_process_that_still_has_the_directory_is_waited_for_and_another_run_is_not(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, holder: str
) -> None:
    """As where its node was given up, and is only slow."""
    monkeypatch.setenv("RESILIENCE_RUN", "this-run")
    caplog.set_level("INFO", "resilience.checkpoint")
    earlier = Directory(home)
    earlier.claim(holder)
    if holder == "another":
        with pytest.raises(DirectoryInUse, match="run another"):
            FlashCheckpoint(home)
        earlier.close()
        return
    come = threading.Thread(target=lambda: FlashCheckpoint(home).close())
    come.start()
    try:
        wait_for(lambda: "Waiting for it" in caplog.text, "it to wait", 60)
        assert come.is_alive()
    finally:
        earlier.close()
        come.join(60)
    assert not come.is_alive()


def test_job_whose_directory_somebody_else_has_taken_meanwhile_does_not_write_into_it(
    home: Path, tmp_path: Path
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    checkpoint.save_state(1, state(1), wait=60)
    checkpoint.wait()
    home.rename(tmp_path / "moved")
    other = Directory(home)
    other.claim("the-other-job")
    checkpoint.save_state(2, state(2), wait=60)
    assert "another job writes its checkpoints here" in failure_of(checkpoint)
    assert not list(home.glob("step-*"))
    other.close()
    with suppress(SaveError):  # waiting for it had it tried a second time
        checkpoint.save_state(3, state(3), wait=60)
    checkpoint.save_state(4, state(4), wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    checkpoint.close()


# -- two jobs in one directory ----------------------------------------------------------------------------------------

_SECOND = """
import sys, resilience
try:
    resilience.FlashCheckpoint(sys.argv[1])
except resilience.checkpoint.stores.claims.DirectoryInUse as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("rank", "through"),
    [
        (0, "its name"),
        pytest.param(1, "a link", marks=pytest.mark.rare),
        pytest.param(1, "its name", marks=pytest.mark.rare),
        pytest.param(0, "a link", marks=pytest.mark.rare),
    ],
)
def test_second_job_is_refused_in_words_and_does_not_disturb_the_first(
    home: Path, saver_home: Path, tmp_path: Path, through: str, rank: int
) -> None:
    checkpoint = FlashCheckpoint(home, disk_every=1)
    checkpoint.save_state(1, state(1), wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    (tmp_path / "link").symlink_to(home)
    name = home if through == "its name" else tmp_path / "link"
    world = {"RANK": rank, "WORLD_SIZE": rank + 1, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": rank + 1}
    environment = {**os.environ, "TMPDIR": str(saver_home), **{key: str(value) for key, value in world.items()}}
    command = [sys.executable, "-c", _SECOND, str(name)]
    second = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert f"{name}: another job writes its checkpoints here" in second.stdout
    for step in (2, 3):
        checkpoint.save_state(step, state(step), wait=60)
        assert checkpoint.wait().level is Level.DURABLE
    assert is_of(checkpoint.load_state(), 3)
    checkpoint.close()
    assert steps_in(home) == [3, 2, 1]
    assert {item.manifest.world for item in Directory(home).stored()} == {1}


_TIRED = """
import json, os, time
sys.path[:] = json.loads(sys.argv[1])["path"]
from resilience.pulse import channel

def send(sock, message, fds=(), real=channel.send):
    real(sock, message, fds)
    while message == {"ok": True} and os.path.exists(path):
        time.sleep(0.005)

channel.send = send
"""


def test_job_that_comes_right_after_another_waits_for_its_saver_to_end(
    home: Path, tmp_path: Path, saver_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver stands still right after the last rank was told that it may go."""
    gate = tmp_path / "gate"
    saver_with(monkeypatch, _TIRED, gate)
    checkpoint = FlashCheckpoint(home, disk_every=1)
    checkpoint.save_state(1, state(1), wait=60)
    assert checkpoint.wait().level is Level.DURABLE
    gate.touch()
    checkpoint.close()
    with pytest.raises(DirectoryInUse) as caught:
        Directory(home).claim("the-next-job")
    gate.unlink()
    assert caught.value.leaving, caught.value
    with FlashCheckpoint(home) as later:
        assert is_of(later.load_state(), 1)


# -- clocks that jump -------------------------------------------------------------------------------------------------

_CLOCK = """
import time

def now():
    with open(path) as file:
        return float(file.read())

time.time = now
"""


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the savers take for the time of day."""
    found = tmp_path / "clock"
    saver_with(monkeypatch, _CLOCK, found)
    return found


def set_to(clock: Path, time: float) -> None:
    partial = clock.with_suffix(".new")
    partial.write_text(str(time))
    partial.rename(clock)


JUMPS = [2e9, 1e9, 3.9e9, 0.0, 1.7e9, 1.7e9]


def test_newest_is_the_last_one_that_was_saved_whatever_the_clock_says(home: Path, clock: Path) -> None:
    set_to(clock, 1.6e9)
    checkpoint = FlashCheckpoint(home, disk_every=1, keep=2)
    for step, time in enumerate(JUMPS):
        set_to(clock, time)
        checkpoint.save_state(step, state(step), wait=60)
        assert checkpoint.wait().level is Level.DURABLE
        kept = [step, step - 1][: step + 1]
        wait_for(lambda: steps_in(home) == kept, "only those saved last to be kept")  # noqa: B023 - it is called here
        assert [item.manifest.created for item in Directory(home).stored()] == [time, *JUMPS[:step][-1:]]
    checkpoint.close()
    set_to(clock, 5e8)
    with FlashCheckpoint(home, disk_every=1) as later:
        assert is_of(later.load_state(), 5)


def test_what_was_saved_after_going_back_is_newer_whatever_the_clock_says(home: Path, clock: Path) -> None:
    set_to(clock, 2e9)
    with FlashCheckpoint(home, disk_every=1) as checkpoint:
        for step in (1, 2, 3):
            checkpoint.save_state(step, state(step), wait=60)
            checkpoint.wait()
    set_to(clock, 1e9)
    with FlashCheckpoint(home, disk_every=1, keep=2) as checkpoint:
        assert is_of(checkpoint.load_state(1), 1)
        checkpoint.save_state(2, state(2), wait=60)
        assert checkpoint.wait().level is Level.DURABLE
    set_to(clock, 0.0)
    wait_for(lambda: steps_in(home) == [2, 3], "only the newest to be kept")
    with FlashCheckpoint(home) as checkpoint:
        assert is_of(checkpoint.load_state(), 2)
        assert checkpoint.latest() == 2


def test_step_that_is_saved_twice_is_restored_as_the_second_time_whatever_the_clock_says(
    home: Path, clock: Path
) -> None:
    set_to(clock, 1.6e9)
    checkpoint = FlashCheckpoint(home, disk_every=1, keep=2)
    for number, time in enumerate(JUMPS):
        set_to(clock, time)
        checkpoint.save_state(7, {"number": number}, wait=60)
        assert checkpoint.wait().level is Level.DURABLE
        newest = Directory(home).stored()[0]
        assert open_disk(newest.path, newest.manifest, 0).values["state"] == {"number": number}
    checkpoint.close()
    with FlashCheckpoint(home) as later:
        assert later.load_state() == {"number": len(JUMPS) - 1}


# -- what a job goes on from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_state_that_is_loaded_again_and_again_is_always_the_newest(home: Path, where: str) -> None:
    """Only a process that fails has failed from it: one that looks many times has not."""
    checkpoint = FlashCheckpoint(home, disk_every=1)
    for step in (1, 2, 3):
        checkpoint.save_state(step, state(step), wait=60)
        checkpoint.wait()
    if where == "disk":
        checkpoint.close()
        checkpoint = FlashCheckpoint(home)
    for _ in range(5):
        assert is_of(checkpoint.load_state(), 3)
    checkpoint.close()
    assert steps_in(home) == [3, 2, 1]


_DIES_WHILE_LOADING = """
import os, sys, resilience

class Thing:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if state["step"] == 2:
            os._exit(9)

checkpoint = resilience.FlashCheckpoint(sys.argv[1], thing=Thing(), rng=False)
print(checkpoint.restore())
"""


def test_checkpoint_whose_loading_kills_the_process_twice_is_set_aside(home: Path, saver_home: Path) -> None:
    class Thing:
        step = 0

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise NotImplementedError

    thing = Thing()
    with FlashCheckpoint(home, disk_every=1, thing=thing, rng=False) as checkpoint:
        for thing.step in (1, 2):
            checkpoint.save(thing.step, wait=60)
            checkpoint.wait()
    wait_for(lambda: not savers(saver_home), "the saver to end")
    command = [sys.executable, "-c", _DIES_WHILE_LOADING, str(home)]
    environment = {**os.environ, "TMPDIR": str(saver_home)}
    done = [
        subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
        for _ in range(3)
    ]
    assert [(one.returncode, one.stdout.strip()) for one in done] == [(9, ""), (9, ""), (0, "2")]
