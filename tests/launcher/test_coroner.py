from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="resilience.launcher.logs is torch's LogsSpecs: left out without torch")

from resilience.launcher import memory
from resilience.launcher.coroner import _MAX_ERROR_FILE, Coroner, Papers, read_error_file
from resilience.launcher.memory import OomWatch, group_of, kills_in

A, B, C = 1_000_000_001, 1_000_000_002, 1_000_000_003  # larger than any process number can be
HYBRID = "9:name=systemd:/\n4:cpu,memory:/job/7\n1:cpuset:/\n0::/unified\n"
UNIFIED = "0::/job/7\n"


class Group:
    """A memory control group made of plain files."""

    def __init__(self, root: Path, version: int) -> None:
        self.folder = root / "job" / "7"
        self.folder.mkdir(parents=True)
        self.version = version
        (root / "cgroup.controllers").write_text("cpu memory\n")
        self.count(0)

    def count(self, kills: int) -> None:
        """Have the kernel count so many kills."""
        if self.version == 1:
            text, name = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n", "memory.oom_control"
        else:
            text, name = f"low 0\nhigh 0\nmax 12\noom 9\noom_kill {kills}\noom_group_kill 9\n", "memory.events"
        (self.folder / name).write_text(text)

    def limit(self, text: str) -> None:
        """Set the limit as the kernel shows it."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.folder / name).write_text(f"{text}\n")


@pytest.fixture(autouse=True)
def roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Put empty folders in place of the machine's own control groups."""
    v1, v2 = tmp_path / "v1", tmp_path / "v2"
    v1.mkdir()
    v2.mkdir()
    monkeypatch.setattr(memory, "_V1", v1)
    monkeypatch.setattr(memory, "_V2", v2)
    return v1, v2


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, roots: tuple[Path, Path]) -> Group:
    """Have every process be in one group, of either version."""
    listing = HYBRID if request.param == 1 else UNIFIED
    monkeypatch.setattr(memory, "group_of", lambda text: group_of(listing))
    return Group(roots[request.param - 1], request.param)


@pytest.fixture
def watch() -> Iterator[OomWatch]:
    watching = OomWatch()
    yield watching
    watching.close()


# -- which group ------------------------------------------------------------------------------------------------------


def test_group_of_version_1_is_the_one_with_the_memory_controller(roots: tuple[Path, Path]) -> None:
    (roots[0] / "job" / "7").mkdir(parents=True)
    assert group_of(HYBRID) == roots[0] / "job" / "7"


def test_group_of_version_2_is_the_only_one(roots: tuple[Path, Path]) -> None:
    (roots[1] / "cgroup.controllers").write_text("memory\n")
    (roots[1] / "job" / "7").mkdir(parents=True)
    assert group_of(UNIFIED) == roots[1] / "job" / "7"


def test_group_of_version_2_without_controllers_is_none() -> None:
    assert group_of(UNIFIED) is None


def test_path_of_the_host_that_a_container_does_not_see_falls_back_to_the_root(roots: tuple[Path, Path]) -> None:
    (roots[1] / "cgroup.controllers").write_text("memory\n")
    assert group_of("4:memory:/docker/abc\n") == roots[0]
    assert group_of("0::/kubepods/pod7\n") == roots[1]
    assert group_of("0::/\n") == roots[1]


def test_colon_in_the_name_of_a_group_is_part_of_it(roots: tuple[Path, Path]) -> None:
    (roots[0] / "a:b").mkdir()
    assert group_of("4:memory:/a:b\n") == roots[0] / "a:b"


@pytest.mark.parametrize("text", ["", "\n", "garbage", "4:cpu:/job", "4:memoryless:/job", ":::", "1:name=memory:/job"])
def test_listing_without_a_memory_group_has_none(text: str) -> None:
    assert group_of(text) is None


# -- how many kills ---------------------------------------------------------------------------------------------------


def test_kills_are_counted_and_not_other_lines_that_look_alike(group: Group) -> None:
    group.count(3)
    assert kills_in(group.folder) == 3


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "oom 3\n", "oom_kill -1\n", "\0\n"])
def test_file_without_a_count_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.events").write_text(text)
    assert kills_in(tmp_path) is None


def test_group_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert kills_in(None) is None
    assert kills_in(tmp_path / "gone") is None


# -- the verdict ------------------------------------------------------------------------------------------------------

SENTENCE = "out of memory: ended by the kernel's OOM killer"


def test_rank_that_died_while_the_count_rose_was_ended_by_the_oom_killer(group: Group, watch: OomWatch) -> None:
    group.count(4)
    watch.begin(os.getpid())
    group.count(5)
    assert watch.verdict([A]) == {A: SENTENCE}


@pytest.mark.parametrize("after", [4, 0])
def test_rank_that_was_killed_while_the_count_did_not_rise_was_not(group: Group, watch: OomWatch, after: int) -> None:
    group.count(4)
    watch.begin(os.getpid())
    group.count(after)
    assert watch.verdict([A]) == {}


def test_of_several_killed_only_as_many_as_were_counted_were_out_of_memory(group: Group, watch: OomWatch) -> None:
    watch.begin(os.getpid())
    group.count(2)
    assert list(watch.verdict([C, A, B])) == [C, A]
    assert watch.verdict([]) == {}


def test_new_cycle_counts_from_its_own_start(group: Group, watch: OomWatch) -> None:
    watch.begin(os.getpid())
    group.count(1)
    watch.begin(os.getpid())
    assert watch.verdict([A]) == {}
    group.count(2)
    assert watch.verdict([A]) == {A: SENTENCE}


def test_limit_of_the_group_is_in_the_sentence(group: Group, watch: OomWatch) -> None:
    watch.begin(os.getpid())
    group.limit(str(3 << 29))
    group.count(1)
    assert watch.verdict([A]) == {A: f"{SENTENCE} (the limit of its control group is 1.50 GiB)"}


@pytest.mark.parametrize("text", ["max", "9223372036854771712", "", "-1"])
def test_group_without_a_limit_is_told_without_one(group: Group, watch: OomWatch, text: str) -> None:
    watch.begin(os.getpid())
    group.limit(text)
    group.count(1)
    assert watch.verdict([A]) == {A: SENTENCE}


def test_group_that_vanished_with_its_last_process_gives_no_verdict(group: Group, watch: OomWatch) -> None:
    watch.begin(os.getpid())
    for file in group.folder.iterdir():
        file.unlink()
    group.folder.rmdir()
    assert watch.verdict([A]) == {}


def test_kill_of_a_machine_without_control_groups_gives_no_verdict(watch: OomWatch) -> None:
    watch.begin(0)
    assert watch.verdict([A]) == {}


def test_count_that_was_not_known_at_the_start_gives_no_verdict(group: Group, watch: OomWatch) -> None:
    assert watch.verdict([A]) == {}, "it has not begun"
    for file in group.folder.iterdir():
        file.unlink()
    watch.begin(os.getpid())
    group.count(7)
    assert watch.verdict([A]) == {}


# -- the kernel's log -------------------------------------------------------------------------------------------------


def record(pid: int) -> bytes:
    return f"3,1234,5678,-;Memory cgroup out of memory: Killed process {pid} (python) total-vm:1kB\n".encode()


@pytest.fixture
def kmsg(monkeypatch: pytest.MonkeyPatch, watch: OomWatch) -> Iterator[Callable[[list[bytes | OSError]], None]]:
    """Have the kernel's log answer one record or error per read, and that there is no more at its end."""
    pending: list[bytes | OSError] = []
    ends = os.pipe()

    def read(fd: int, size: int, real: Callable[[int, int], bytes] = os.read) -> bytes:
        if fd != ends[0]:
            return real(fd, size)
        answer = pending.pop(0) if pending else BlockingIOError()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def say(answers: list[bytes | OSError]) -> None:
        watch.close()
        watch._kmsg = ends[0]
        pending.extend(answers)

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read)
        yield say
    watch._kmsg = -1
    for end in ends:
        os.close(end)


def test_kernels_log_names_the_process_where_nothing_is_counted(
    watch: OomWatch, kmsg: Callable[[list[bytes | OSError]], None]
) -> None:
    kmsg([b"6,1,1,-;eth0: link up\n", record(B)])
    assert watch.verdict([A, B]) == {B: SENTENCE}


def test_process_that_the_log_names_comes_before_those_that_are_counted(
    group: Group, watch: OomWatch, kmsg: Callable[[list[bytes | OSError]], None]
) -> None:
    watch.begin(os.getpid())
    group.count(1)
    kmsg([record(B)])
    assert watch.verdict([A, B]) == {B: SENTENCE}


def test_log_that_names_somebody_else_leaves_the_count_to_speak(
    group: Group, watch: OomWatch, kmsg: Callable[[list[bytes | OSError]], None]
) -> None:
    watch.begin(os.getpid())
    group.count(1)
    kmsg([record(C)])
    assert watch.verdict([A, B]) == {A: SENTENCE}


def test_log_that_was_overwritten_since_the_cycle_began_is_read_on(
    watch: OomWatch, kmsg: Callable[[list[bytes | OSError]], None]
) -> None:
    # The kernel answers EPIPE once when records were lost, and goes on with the oldest that is left: a run of days sees it.
    kmsg([BrokenPipeError(), record(A)])
    assert watch.verdict([A]) == {A: SENTENCE}


@pytest.mark.parametrize("let_go", [OomWatch.close, lambda watching: watching.begin(os.getpid())])
def test_log_of_a_cycle_that_is_over_is_closed(
    group: Group, watch: OomWatch, let_go: Callable[[OomWatch], None]
) -> None:
    watch._kmsg, other_end = os.pipe()
    let_go(watch)
    with pytest.raises(BrokenPipeError):
        os.write(other_end, b"nobody reads")
    os.close(other_end)
    watch.close()
    watch.close()


# -- error files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def error_file(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


def test_error_file_is_read(error_file: Path) -> None:
    error_file.write_text('{"message": {"message": "ValueError: x"}}')
    assert read_error_file(str(error_file)) == {"message": {"message": "ValueError: x"}}


@pytest.mark.parametrize("path", [None, "", "/nowhere/error.json", "\0"])
def test_error_file_that_is_missing_says_nothing(path: str | None) -> None:
    assert read_error_file(path) is None


def test_error_file_that_is_dev_null_or_a_directory_says_nothing(tmp_path: Path) -> None:
    assert read_error_file(os.devnull) is None
    assert read_error_file(str(tmp_path)) is None


def test_error_file_without_end_is_not_read_to_its_end(error_file: Path) -> None:
    with error_file.open("wb") as file:
        file.write(b'{"message": "')
        file.truncate(1 << 40)  # sparse: a terabyte that no memory holds
    assert read_error_file(str(error_file)) is None


def test_error_file_that_is_large_but_not_too_large_is_read(error_file: Path) -> None:
    text = "x" * (_MAX_ERROR_FILE - 100)
    error_file.write_text(json.dumps({"message": text}))
    assert read_error_file(str(error_file)) == {"message": text}


@pytest.mark.parametrize("data", [b"", b"{", b"half a rep", b"\xff\xfe", b"\0", b"1" * 5000, b"{'a': 1}", b'{"a": 1}}'])
def test_error_file_that_is_no_json_says_nothing(error_file: Path, data: bytes) -> None:
    error_file.write_bytes(data)
    assert read_error_file(str(error_file)) is None


@pytest.mark.parametrize("data", [b"[1]", b'"text"', b"5", b"null", b"true", b"NaN", b"[]"])
def test_error_file_that_is_no_object_says_nothing(error_file: Path, data: bytes) -> None:
    error_file.write_bytes(data)
    assert read_error_file(str(error_file)) is None


def test_error_file_with_bytes_that_are_no_text_is_read_with_marks_in_their_place(error_file: Path) -> None:
    error_file.write_bytes(b'{"message": "\xff"}')
    assert read_error_file(str(error_file)) == {"message": "\ufffd"}


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_error_file_nested_without_end_says_nothing(error_file: Path, opening: str) -> None:
    error_file.write_text(opening * 100_000)
    assert read_error_file(str(error_file)) is None


def test_error_file_that_is_a_pipe_nobody_writes_to_does_not_hold_the_launcher_up(error_file: Path) -> None:
    os.mkfifo(error_file)
    read: list[Any] = []
    thread = threading.Thread(target=lambda: read.append(read_error_file(str(error_file))), daemon=True)
    thread.start()
    thread.join(5)
    held_up = thread.is_alive()
    os.close(os.open(error_file, os.O_RDWR))  # lets a reader that waits for a writer go on
    thread.join(30)
    assert not held_up
    assert read == [None]


# -- together ---------------------------------------------------------------------------------------------------------


def test_rank_that_the_oom_killer_ended_is_told_from_those_that_were_only_killed(group: Group) -> None:
    coroner = Coroner()
    coroner.begin(Papers(pids={0: A, 1: B, 2: C}))
    group.count(1)
    failures = coroner.examine({0: -9, 1: -9, 2: -15}, {0: 300, 1: 200, 2: 100}, [])
    coroner.close()
    assert [(failure.rank, failure.kind) for failure in failures] == [(0, "signal"), (1, "oom"), (2, "signal")]
    assert (failures[1].message, failures[1].at_ns) == (SENTENCE, 200)


def test_what_was_found_out_once_stays_when_file_and_log_are_gone(tmp_path: Path) -> None:
    error, log = tmp_path / "error.json", tmp_path / "stderr.log"
    error.write_text(json.dumps({"message": {"message": "ValueError: bad batch", "extraInfo": {"py_callstack": ""}}}))
    log.write_text("epoch 1\nbye\n")
    coroner = Coroner()
    coroner.begin(Papers(pids={0: A}, logs={0: str(log)}, errors={0: str(error)}))
    (first,) = coroner.examine({0: 1}, {0: 100}, [{"rank": 0, "sections": [{"name": "load", "age_s": 1.0}]}])
    error.unlink()
    log.unlink()
    (again,) = coroner.examine({0: 1}, {0: 900}, [])
    coroner.close()
    assert again == first
    assert (first.message, first.log, first.log_path) == ("ValueError: bad batch", ("epoch 1", "bye"), str(log))
    assert [item["name"] for item in first.sections] == ["load"]


def test_rank_of_which_nothing_is_known_is_told_by_its_exit_code() -> None:
    coroner = Coroner()
    coroner.begin(Papers())
    (failure,) = coroner.examine({7: 3}, {}, [])
    coroner.close()
    assert (failure.rank, failure.message, failure.log) == (7, "ended with exit code 3", ())
    assert coroner.log_of(7) == ([], None)


@pytest.mark.parametrize(
    ("type_", "message", "code"),
    [
        ("SystemExit", "201", 201),
        ("SystemExit", "no data", 1),
        ("SystemExit", "256", 1),
        ("ValueError", "201", 1),
    ],
)
def test_rank_that_has_not_ended_yet_is_told_with_the_code_that_its_exception_will_give_it(
    tmp_path: Path, type_: str, message: str, code: int
) -> None:
    """Seen a moment earlier or later, it is the same failure."""
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"resilience": {"pid": A, "mono_ns": 1, "type": type_, "message": message}}))
    coroner = Coroner()
    coroner.begin(Papers(pids={0: A}, errors={0: str(error)}))
    try:
        assert coroner.dying([{"rank": 0, "pid": A, "in_flight": True}]) == {0: code}
    finally:
        coroner.close()
