"""Checkpoints in a directory: the right bytes, one job at a time, and nothing listed that is not whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from resilience.checkpoint import digest, files, manifest, writing
from resilience.checkpoint.manifest import Manifest, ManifestError
from resilience.checkpoint.saver import clerk, restores
from resilience.checkpoint.saver.writes import Write
from resilience.checkpoint.stores import local
from resilience.checkpoint.stores.claims import DirectoryInUse
from resilience.checkpoint.stores.local import Directory, Stored
from resilience.checkpoint.writing import Stopwatch
from resilience.errors import CheckpointError

REPO = Path(local.__file__).parents[3]
BLOCK = 4096


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    made = Directory(tmp_path / "checkpoints")
    made.claim("this-test")
    yield made
    made.close()


def memory(nbytes: int, seed: int = 0) -> memoryview:
    """Random bytes at the beginning of a page, as those of a slot are."""
    room = mmap.mmap(-1, max(nbytes, 1))
    room[:nbytes] = random.Random(seed).randbytes(nbytes)
    return memoryview(room)[:nbytes]


def write(directory: Directory, step: int, generation: int = 1, created: float = 1.0) -> Path:
    """Write a small checkpoint of two ranks; return where it is."""
    before = set(directory.path.iterdir())
    folder = directory.partial("being-written")
    shard = writing.write_file(folder / "rank-00000.safetensors", 0, b"h" * BLOCK, memory(5000, step))
    names = [(rank, folder / f"rank-{rank:05d}.values") for rank in range(2)]
    values = [writing.write_file(name, rank, b"", memoryview(b"values")) for rank, name in names]
    directory.commit("being-written", Manifest(step, generation, 0, 2, created, (shard,), tuple(values)))
    (path,) = set(directory.path.iterdir()) - before
    return path


def keys(found: list[Stored]) -> list[tuple[int, int]]:
    return [item.manifest.key for item in found]


# -- files --------------------------------------------------------------------------------------------------------------

EDGES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, *(n * BLOCK + more for n in (4, 8) for more in (-1, 0, 1))]
EDGES += [9 * BLOCK + 7, 29 * BLOCK]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four blocks, and pieces of two chunks."""
    monkeypatch.setattr(digest, "_CHUNK", 4 * BLOCK)
    monkeypatch.setattr(writing, "PIECE", 8 * BLOCK)


def check_file(path: Path, head: bytes, data: memoryview) -> None:
    """Write a file and look whether it is what it should be, and described as what it is."""
    seen: list[int] = []
    file = writing.write_file(path, 3, head, data, progress=seen.append)
    assert path.read_bytes() == head + bytes(data)
    assert (file.name, file.rank, file.nbytes, file.head) == (path.name, 3, len(head) + len(data), len(head))
    of_head = [digest.digest(head)] if head else []
    assert list(file.digests) == of_head + digest.digests(data, file.chunk)
    assert sum(seen) == len(data)
    assert writing.write_file(path, 3, head, data, digests=file.digests[len(of_head) :]) == file


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("head", [0, BLOCK, 2 * BLOCK, 100])
@pytest.mark.parametrize("nbytes", EDGES)
def test_file_has_the_right_bytes_and_digests_around_blocks_chunks_and_pieces(
    tmp_path: Path, nbytes: int, head: int
) -> None:
    (tmp_path / "file").write_bytes(b"of an earlier try" * 10_000)
    check_file(tmp_path / "file", b"h" * head, memory(nbytes))


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_file_of_a_whole_chunk_and_a_byte_more_or_less_is_right(tmp_path: Path, more: int) -> None:
    data = memory((16 << 20) + more)
    check_file(tmp_path / "file", b"h" * BLOCK, data)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600  # nobody else's business


@pytest.mark.parametrize("offset", [1, 8, 512])
def test_memory_at_an_odd_address_is_written_all_the_same(tmp_path: Path, offset: int) -> None:
    check_file(tmp_path / "file", b"", memory(9 * BLOCK)[offset:])


@pytest.mark.parametrize("at", ["open", "pwrite"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_that_refuses_direct_writes_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, number: int
) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    refused: list[str] = []

    def open_(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT and at == "open":
            refused.append(at)
            raise OSError(number, os.strerror(number))
        return real_open(path, flags & ~os.O_DIRECT, *args)

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if at == "pwrite" and not refused:
            refused.append(at)
            real_pwrite(fd, b"half", offset)
            raise OSError(number, os.strerror(number))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    check_file(tmp_path / "file", b"", memory(9 * BLOCK + 7))
    assert refused


def test_data_behind_a_header_is_written_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no direct writes: left out is that they are used")
    real, direct = os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        wrote = real(fd, data, offset)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append((offset, wrote))
        return wrote

    monkeypatch.setattr(os, "pwrite", pwrite)
    writing.write_file(tmp_path / "file", 0, b"h" * BLOCK, memory(9 * BLOCK + 7))
    assert direct == [(BLOCK, 9 * BLOCK)]


@pytest.mark.parametrize("chunk", [2, 4, 16])
def test_no_more_than_a_piece_is_under_way_at_once_and_progress_is_told_after_each_that_is_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(digest, "_CHUNK", chunk * BLOCK)
    monkeypatch.setattr(writing, "PIECE", 8 * BLOCK)
    real, sizes, seen = os.pwrite, [], list[int]()

    def pwrite(fd: int, data: Any, at: int) -> int:
        sizes.append(len(data))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writing.write_file(tmp_path / "file", 0, b"", memory(33 * BLOCK), progress=seen.append)
    assert sizes == [8 * BLOCK] * 4 + [BLOCK]
    assert seen == [max(8, chunk) * BLOCK] * (32 // max(8, chunk)) + [BLOCK]


@pytest.mark.usefixtures("small")
def test_piece_is_digested_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other: one after the other they would never get on."""
    real_pwrite, real_digests, both = os.pwrite, digest.digests, threading.Barrier(2, timeout=20)

    def pwrite(fd: int, data: Any, at: int) -> int:
        both.wait()
        return real_pwrite(fd, data, at)

    def digests(data: memoryview, size: int) -> list[str]:
        both.wait()
        return real_digests(data, size)

    data, clock = memory(32 * BLOCK), Stopwatch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(digest, "digests", digests)
        file = writing.write_file(tmp_path / "file", 0, b"", data, clock=clock)
    assert list(file.digests) == digest.digests(data, 4 * BLOCK)
    assert {what for what, seconds in clock.seconds.items() if seconds > 0} == {"digest", "write", "fsync"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("culprit", ["pwrite", "digests"])
def test_piece_that_can_not_be_written_or_digested_raises_that_and_leaves_no_descriptor_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: str
) -> None:
    module: Any = {"pwrite": os, "digests": digest}[culprit]
    real, calls = getattr(module, culprit), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    before = sorted(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(module, culprit, fail)
        writing.write_file(tmp_path / "file", 0, b"", memory(32 * BLOCK))
    assert caught.value.errno == errno.EIO
    assert len(calls) == 3
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("resilience-digest")]


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="no /dev/full: left out is a disk that is full from the start"
)
def test_full_disk_raises_and_what_is_discarded_leaves_nothing_behind(directory: Directory) -> None:
    folder = directory.partial("5")
    (folder / "rank-00000.values").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        writing.write_file(folder / "rank-00000.values", 0, b"", memory(2 * BLOCK + 5))
    assert caught.value.errno == errno.ENOSPC
    directory.discard("5")
    assert [path.name for path in directory.path.iterdir()] == [".lock"]


_LIMITED = """
import mmap, resource, sys
from pathlib import Path
from resilience.checkpoint import writing
from resilience.checkpoint.stores import local
resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
directory = local.Directory(Path(sys.argv[1]))
directory.claim("limited")
try:
    folder = directory.partial("5")
    writing.write_file(folder / "rank-00000.values", 0, b"h" * 4096, memoryview(mmap.mmap(-1, 1 << 20)))
except OSError as error:
    sys.exit(error.errno)
"""


@pytest.mark.spawns
def test_file_that_may_not_grow_raises_in_the_middle_and_is_swept_by_the_next_job(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path)], cwd=REPO, timeout=60, check=False)
    assert done.returncode == errno.EFBIG
    next_job = Directory(tmp_path)
    assert next_job.stored() == []
    next_job.claim("next")
    next_job.close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_that_may_not_grow_is_a_failure_that_says_what_to_do(directory: Directory) -> None:
    folder = directory.partial("5")
    values = writing.write_file(folder / "rank-00000.values", 0, b"", memoryview(b"values"))
    wanted = Write((1, 5), 1, 0, 0.0, set(), [], [asdict(values) | {"digests": list(values.digests)}])
    with file_size_limit(10):
        said = clerk.commit(directory, "5", wanted, {})
    assert said.startswith(f"step 5 could not be written to {directory.path} (")
    assert ": File too large. What was durable before stays. A file may not grow that large: raise the limit" in said
    assert clerk.commit(directory, "5", wanted, {}) == ""


def test_mark_tells_nodes_that_they_share_a_directory_and_goes_with_its_maker(directory: Directory) -> None:
    first, second = directory.mark(), directory.mark()
    assert [path.name for path in directory.path.glob(".partial-*")] == [second] != [first]
    directory.close()
    assert list(directory.path.glob(".partial-*")) == []


def test_free_bytes_are_those_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = local.free_bytes(tmp_path / "not" / "there")
    assert abs(free - found.f_bavail * found.f_frsize) < 1 << 30


# -- one job at a time ----------------------------------------------------------------------------------------------------

_HOLD = """
import sys
from pathlib import Path
from resilience.checkpoint.stores.local import Directory
directory = Directory(Path(sys.argv[1]))
directory.claim("the-other-job")
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.spawns
def test_second_job_is_refused_in_words_until_the_first_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"claimed\n"
        second = Directory(tmp_path)
        with pytest.raises(DirectoryInUse, match="another job writes its checkpoints here") as caught:
            second.claim("this-job")
        assert str(tmp_path) in str(caught.value)
        assert "the-other-job" in str(caught.value)
        assert str(holder.pid) in str(caught.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        second.claim("this-job")
        assert b"this-job" in (tmp_path / ".lock").read_bytes()
        second.close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def test_directory_is_let_go_by_closing_and_may_be_claimed_again(directory: Directory) -> None:
    other = Directory(directory.path)
    with pytest.raises(DirectoryInUse, match="this-test"):
        other.claim("other")
    directory.claim("again")  # it is ours already
    directory.close()
    directory.close()
    other.claim("other")
    other.close()


def test_directory_is_not_let_go_while_somebody_is_at_work(directory: Directory) -> None:
    other, closing = Directory(directory.path), threading.Thread(target=directory.close)
    with directory.at_work():
        closing.start()
        closing.join(0.05)
        with pytest.raises(DirectoryInUse, match="this-test"):
            other.claim("other")
    closing.join(20)
    other.claim("other")
    other.close()


def test_what_an_earlier_job_left_half_done_is_swept(directory: Directory) -> None:
    path = write(directory, 1)
    directory.close()
    for name in (".partial-00000002", ".partial-gone-step-00000000"):
        (directory.path / name).mkdir()
        (directory.path / name / "rank-00000.values").write_bytes(b"half")
    assert keys(directory.stored()) == [(1, 1)]
    directory.claim("next")
    assert {item.name for item in directory.path.iterdir()} == {".lock", path.name}


def test_link_in_the_place_of_the_lock_is_refused_in_words_and_what_it_leads_to_is_not_touched(tmp_path: Path) -> None:
    """A directory may have been unpacked from somebody's archive."""
    victim, home = tmp_path / "victim", tmp_path / "checkpoints"
    victim.write_text("precious")
    home.mkdir()
    for target in (victim, tmp_path / "not-there"):
        (home / ".lock").symlink_to(target)
        with pytest.raises(CheckpointError, match=r"\.lock is a symbolic link.* Nothing was written\. Remove it"):
            Directory(home).claim("job")
        (home / ".lock").unlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "not-there").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_lock_that_is_no_file_is_refused_in_words(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock is no regular file"):
        Directory(tmp_path).claim("job")


def test_lock_that_becomes_a_link_while_it_is_held_is_no_longer_ours(directory: Directory, tmp_path: Path) -> None:
    (directory.path / ".lock").rename(tmp_path / "moved")
    (directory.path / ".lock").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        directory.hold()


def test_links_and_pipes_that_look_half_done_are_swept_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    """Else the next save of that name would be written wherever a link leads."""
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "checkpoints"
    elsewhere.mkdir()
    home.mkdir()
    (elsewhere / "file").write_text("precious")
    (home / ".partial-5").symlink_to(elsewhere)
    (home / ".partial-6").symlink_to(elsewhere / "file")
    (home / ".partial-7").symlink_to("nowhere")
    os.mkfifo(home / ".partial-8")
    directory = Directory(home)
    directory.claim("job")
    directory.close()
    assert [path.name for path in home.iterdir()] == [".lock"]
    assert (elsewhere / "file").read_text() == "precious"


def test_full_disk_does_not_keep_a_job_from_claiming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first, second = Directory(tmp_path), Directory(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        first.claim("first")
    with pytest.raises(DirectoryInUse, match="unknown"):
        second.claim("second")
    first.close()


# -- what is listed -------------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_newest_first_by_generation_then_step(directory: Directory) -> None:
    for generation, step in ((1, 100), (2, 7), (1, 9), (2, 30), (1, 1000)):
        write(directory, step, generation)
    assert keys(directory.stored()) == [(2, 30), (2, 7), (1, 1000), (1, 100), (1, 9)]


def test_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert Directory(tmp_path / "absent").stored() == []


def test_same_step_written_again_gets_a_name_of_its_own_and_the_later_one_is_newer(directory: Directory) -> None:
    names = [write(directory, 7, generation, created).name for generation, created in ((1, 1.0), (1, 3.0), (1, 2.0))]
    assert names == ["step-00000007", "step-00000007.2", "step-00000007.3"]
    assert [item.manifest.created for item in directory.stored()] == [2.0, 3.0, 1.0], "by number, not by date"
    write(directory, 7, generation=2)
    assert keys(directory.stored()) == [(2, 7), (1, 7), (1, 7), (1, 7)]


def unlist(path: Path, how: str) -> None:
    """Damage a checkpoint."""
    shard, contents = path / "rank-00000.safetensors", path / manifest.NAME
    if how == "no manifest":
        contents.unlink()
    elif how == "missing file":
        shard.unlink()
    elif how == "wrong size":
        os.truncate(shard, shard.stat().st_size - 1)
    elif how == "damaged manifest":
        contents.write_bytes(contents.read_bytes().replace(b'"step": 2', b'"step": 3'))
    elif how == "empty manifest":
        contents.write_bytes(b"")
    elif how == "pipe":
        (path / "rank-00001.values").unlink()
        os.mkfifo(path / "rank-00001.values")
    elif how == "device":
        (path / "rank-00001.values").unlink()
        (path / "rank-00001.values").symlink_to("/dev/zero")
    elif how == "manifest is a folder":
        contents.unlink()
        contents.mkdir()
    else:
        shutil.rmtree(path)
        path.write_bytes(b"a file in its place")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no manifest", "there is no manifest: it was never finished"),
        ("missing file", "rank-00000.safetensors is missing"),
        ("wrong size", "rank-00000.safetensors has 9095 bytes, not 9096"),
        ("damaged manifest", "its digest is wrong"),
        ("empty manifest", "its digest is wrong"),
        ("pipe", "rank-00001.values is no regular file"),
        ("device", "rank-00001.values is no regular file"),
        ("manifest is a folder", "Is a directory"),
        ("a file", "Not a directory"),
    ],
)
def test_checkpoint_that_is_not_whole_is_left_out_and_named(directory: Directory, how: str, said: str) -> None:
    write(directory, 1)
    path = write(directory, 2)
    unlist(path, how)
    complaints: list[str] = []
    assert keys(directory.stored(complaints.append)) == [(1, 1)]
    (text,) = complaints
    assert text.startswith(f"{path}: ")
    assert said in text
    assert text.endswith("It is left out.")
    with pytest.raises((ManifestError, OSError)):
        local.read_manifest(path)


def test_checkpoint_that_was_set_aside_is_left_out_with_the_reason_and_stays_on_disk(directory: Directory) -> None:
    write(directory, 1)
    path = write(directory, 2)
    directory.set_aside(directory.stored()[0], "two restarts failed from it")
    complaints: list[str] = []
    assert keys(directory.stored(complaints.append)) == [(1, 1)]
    assert complaints == [f"{path}: it was set aside: two restarts failed from it. It is left out."]
    assert directory.prune(1) == []
    assert local.read_manifest(path).step == 2


@pytest.mark.parametrize("name", [".aside", ".aside.new"])
def test_mark_that_is_set_is_not_written_through_a_link(directory: Directory, tmp_path: Path, name: str) -> None:
    victim, path = tmp_path / "victim", write(directory, 1)
    (item,) = directory.stored()
    (path / name).symlink_to(victim)  # which leads nowhere: the checkpoint counts
    directory.set_aside(item, "two restarts failed from it")
    assert not victim.exists()
    assert (path / ".aside").read_text() == "two restarts failed from it"
    assert not (path / ".aside").is_symlink()
    assert not os.path.lexists(path / ".aside.new")
    assert directory.stored() == []


@pytest.mark.parametrize("name", [".restores.json", ".restores.json.new"])
def test_what_the_job_went_on_from_is_not_noted_through_a_link(tmp_path: Path, name: str) -> None:
    victim, home = tmp_path / "victim", tmp_path / "checkpoints"
    home.mkdir()
    victim.write_text("precious")
    (home / name).symlink_to(victim)
    restores.write(Directory(home), {(1, 2): 3})
    assert victim.read_text() == "precious"
    assert restores.read(Directory(home)) == {(1, 2): 3}
    assert [path.name for path in home.iterdir()] == [".restores.json"]


def test_small_file_that_can_not_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    files.write_small(tmp_path / "file", "before")
    with file_size_limit(3), pytest.raises(OSError) as caught:
        files.write_small(tmp_path / "file", "after")
    assert caught.value.errno == errno.EFBIG
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


# -- what is kept ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (1, 0, [59]),
        (2, 0, [59, 49]),
        (0, 0, [59]),  # never the last one
        (-3, 0, [59]),
        (9, 0, [59, 49, 39, 29, 19, 9]),
        (1, 20, [59, 39, 19]),  # steps are counted from 0: the 20th is 19
        (2, 30, [59, 49, 29]),
    ],
)
def test_pruning_keeps_the_newest_and_every_so_many_steps_for_good(
    directory: Directory, keep: int, keep_every: int, left: list[int]
) -> None:
    for step in range(9, 60, 10):
        write(directory, step)
    gone = directory.prune(keep, keep_every)
    assert [item.manifest.step for item in directory.stored()] == left
    assert {item.manifest.step for item in gone} == set(range(9, 60, 10)) - set(left)
    assert len(list(directory.path.iterdir())) == len(left) + 1  # and the lock


def test_pruning_counts_whole_checkpoints_only(directory: Directory) -> None:
    for step in (1, 2, 3):
        write(directory, step)
    unlist(directory.path / "step-00000003", "wrong size")
    assert [item.manifest.step for item in directory.prune(1)] == [1]
    assert keys(directory.stored()) == [(1, 2)]


def test_crash_while_pruning_leaves_nothing_that_is_listed_and_the_next_job_sweeps_it(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(directory, step)

    def crash(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            raise SystemExit("killed")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", crash)
        directory.prune(1)
    complaints: list[str] = []
    assert keys(directory.stored(complaints.append)) == [(1, 2)]
    assert complaints == []
    directory.close()
    directory.claim("next")
    assert {path.name for path in directory.path.iterdir()} == {".lock", "step-00000002"}


def test_checkpoint_behind_a_link_is_pruned_by_removing_the_link(directory: Directory, tmp_path: Path) -> None:
    """Somebody has moved an old one to other storage."""
    path, moved = write(directory, 1), tmp_path / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    write(directory, 2)
    assert [item.manifest.step for item in directory.prune(1)] == [1]
    assert {path.name for path in directory.path.iterdir()} == {".lock", "step-00000002"}
    assert local.read_manifest(moved).step == 1


def test_what_could_not_be_removed_is_tried_again_by_the_next_pruning(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(directory, step)
    for _ in range(2):  # the second time another one of the same step
        with monkeypatch.context() as patch:
            # A file in it is open elsewhere, over NFS.
            patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
            assert [item.manifest.step for item in directory.prune(1)] == [1]
        assert list(directory.path.glob(".partial-gone-step-00000001*"))
        write(directory, 1)
    shutil.rmtree(directory.path / "step-00000001")
    assert directory.prune(1) == []
    assert {path.name for path in directory.path.iterdir()} == {".lock", "step-00000002"}
