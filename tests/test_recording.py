"""What leaves a recorded function goes on as it came, whatever stands in the way, and its report says what it was."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import platform
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import resilience
from resilience import recording
from resilience.failover.failure import examine
from resilience.pulse import attach, client
from resilience.pulse.section import leave_mark

NOT_MADE = "(its text could not be made)"
TORCH_ERRORS = "torch.distributed.elastic.multiprocessing.errors"


class ErrorFile:
    """The file that ``TORCHELASTIC_ERROR_FILE`` names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return data

    def ours(self) -> dict[str, Any]:
        part: dict[str, Any] = self.read()["resilience"]
        return part

    def sections(self) -> list[str]:
        return [item["name"] for item in self.ours()["sections"]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a process that no launcher started, that has not called us yet and that has annotated nothing."""
    for name in ("RESILIENCE_SOCKET", "RESILIENCE_LATE_ATTACH", "RESILIENCE_CYCLE", "RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(attach._Attached, "page", None)
    monkeypatch.setattr(client, "_here", client._Process())
    monkeypatch.setattr(recording, "_context", {})


@pytest.fixture
def error_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ErrorFile:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return ErrorFile(path)


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "DEADLINE_S", 0.05)


def leaves(error: BaseException, **options: Any) -> BaseException:
    """Have a recorded function raise ``error``; return what left it."""

    def main() -> NoReturn:
        raise error

    try:
        resilience.record(**options)(main)()
    except BaseException as left:  # noqa: BLE001 - whichever it is, the test compares it
        return left
    raise AssertionError("nothing left")


def await_writers() -> None:
    """Wait for reports that were given up on, now that what held them up is gone."""
    for thread in threading.enumerate():
        if thread.name == "resilience-record":
            thread.join(30)
            assert not thread.is_alive()


def read_by_the_launcher(error_file: ErrorFile) -> dict[str, Any] | None:
    pytest.importorskip("torch", reason="the launcher is torch's")
    from resilience.launcher.coroner import read_error_file

    return read_error_file(str(error_file.path))


class Stop(BaseException):
    """Not an Exception: torch's own decorator does not see it."""


# -- the decorator ----------------------------------------------------------------------------------------------------


def test_exception_is_recorded_without_parentheses(error_file: ErrorFile) -> None:
    @resilience.record
    def main(batch: int) -> NoReturn:
        raise ValueError(f"bad batch {batch}")

    with pytest.raises(ValueError, match="bad batch 7"):
        main(7)
    assert error_file.read()["message"]["message"] == "ValueError: bad batch 7"


def test_exception_is_recorded_with_parentheses(error_file: ErrorFile) -> None:
    @resilience.record()
    def main() -> NoReturn:
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        main()
    assert error_file.read()["message"]["message"] == "ValueError: bad batch"


def test_function_that_returns_is_as_it_was_and_leaves_no_file(error_file: ErrorFile) -> None:
    @resilience.record
    def main(a: int, *, b: int) -> int:
        """Do it."""
        return a + b

    assert main(1, b=2) == 3
    assert (main.__name__, main.__doc__) == ("main", "Do it.")
    assert not error_file.path.exists()


@pytest.mark.parametrize("decorate", [resilience.record, resilience.record()])
def test_exception_of_an_async_function_is_recorded_when_it_runs(
    error_file: ErrorFile, decorate: Callable[..., Any]
) -> None:
    error = KeyError("x")

    @decorate
    async def main(fail: bool) -> str:
        await asyncio.sleep(0)
        if fail:
            raise error
        return "fine"

    assert inspect.iscoroutinefunction(main)
    assert asyncio.run(main(False)) == "fine"
    assert not error_file.path.exists()
    with pytest.raises(KeyError) as caught:
        asyncio.run(main(True))
    assert caught.value is error
    assert error_file.ours()["type"] == "KeyError"


def test_exception_of_a_generator_kind_is_recorded_and_not_turned_into_another(error_file: ErrorFile) -> None:
    error = StopIteration("the loader is empty")
    assert leaves(error) is error
    assert error_file.ours()["type"] == "StopIteration"


@pytest.mark.parametrize(
    "error", [ValueError("x"), Stop("x"), KeyboardInterrupt(), SystemExit(3), SystemExit("no data"), GeneratorExit()]
)
def test_whatever_ends_the_function_is_recorded_and_the_same_object_leaves(
    error_file: ErrorFile, error: BaseException
) -> None:
    assert leaves(error) is error
    said = error_file.read()["message"]["message"]
    assert said == f"{type(error).__name__}: {error}"
    assert error_file.ours()["message"] == str(error)


@pytest.mark.parametrize("code", [0, None, False])
def test_exit_without_a_failure_leaves_and_is_not_recorded(error_file: ErrorFile, code: int | None) -> None:
    error = SystemExit(code)
    assert leaves(error) is error
    assert not error_file.path.exists()


@pytest.mark.parametrize("code", ["", 0.0, []])
def test_exit_with_an_empty_word_is_recorded_since_python_ends_with_1(error_file: ErrorFile, code: Any) -> None:
    assert leaves(SystemExit(code)).args == (code,)
    assert error_file.ours()["type"] == "SystemExit"


def test_nested_decorators_record_once(error_file: ErrorFile) -> None:
    @resilience.record(error_code=5)
    def inner() -> NoReturn:
        raise ValueError("bad batch")

    @resilience.record(error_code=6)
    def outer() -> None:
        try:
            inner()
        except ValueError:
            assert error_file.ours()["error_code"] == 5
            error_file.path.unlink()
            raise

    with pytest.raises(ValueError, match="bad batch"):
        outer()
    assert not error_file.path.exists()


def test_another_exception_that_replaces_a_recorded_one_is_recorded_too(error_file: ErrorFile) -> None:
    @resilience.record
    def inner() -> NoReturn:
        raise ValueError("bad batch")

    @resilience.record
    def outer() -> None:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("epoch failed") from error

    with pytest.raises(RuntimeError):
        outer()
    assert [link["type"] for link in error_file.ours()["chain"]] == ["RuntimeError", "ValueError"]


class Handler:
    """What torch's callers pass as ``error_handler``."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.seen: list[BaseException] = []
        self.fault = fault

    def record_exception(self, error: BaseException) -> None:
        self.seen.append(error)
        if self.fault is not None:
            raise self.fault


def test_handler_of_torchs_callers_is_told_and_its_own_failure_does_not_leave(error_file: ErrorFile) -> None:
    handler, error = Handler(OSError("disk full")), ValueError("bad batch")
    assert leaves(error, error_handler=handler) is error
    assert handler.seen == [error]
    assert error_file.ours()["type"] == "ValueError"


def test_handler_is_not_told_of_what_torch_does_not_tell_it(error_file: ErrorFile) -> None:
    handler = Handler()
    leaves(Stop("x"), error_handler=handler)
    assert handler.seen == []
    assert error_file.ours()["message"] == "x"


def test_torchs_own_handler_does_not_take_our_part_of_the_report_away(error_file: ErrorFile) -> None:
    errors = pytest.importorskip(TORCH_ERRORS)
    leaves(ValueError("bad batch"), error_handler=errors.get_error_handler())
    assert error_file.read()["message"]["message"] == "ValueError: bad batch"
    assert error_file.ours()["type"] == "ValueError"


# -- the exception goes on as it came ---------------------------------------------------------------------------------


def test_exception_leaves_without_a_cause_a_context_or_frames_that_it_had_not(error_file: ErrorFile) -> None:
    error = ValueError("bad batch", 7)
    assert leaves(error) is error
    assert error.args == ("bad batch", 7)
    assert (error.__cause__, error.__context__, error.__suppress_context__) == (None, None, False)
    functions = []
    trace = error.__traceback__
    while trace is not None:
        functions.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert functions == ["leaves", "recorded", "main"]
    assert error_file.path.exists()


@pytest.mark.parametrize("fault", [RuntimeError("no text"), KeyboardInterrupt(), SystemExit(0)])
def test_original_exception_leaves_unchanged_when_its_text_raises(error_file: ErrorFile, fault: BaseException) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise fault

    error = MuteError("x")
    assert leaves(error) is error
    assert error_file.ours()["message"] == NOT_MADE
    assert error_file.read()["message"]["message"] == f"MuteError: {NOT_MADE}"
    assert "in main" in error_file.read()["message"]["extraInfo"]["py_callstack"]


@pytest.mark.usefixtures("deadline")
def test_original_exception_leaves_unchanged_when_its_text_hangs(error_file: ErrorFile) -> None:
    release = threading.Event()

    class EndlessError(Exception):
        def __str__(self) -> str:
            assert release.wait(60)
            return "at last"

    error = EndlessError()
    try:
        assert leaves(error) is error
        assert not error_file.path.exists(), "the text was waited for"
    finally:
        release.set()
        await_writers()


@pytest.mark.usefixtures("deadline")
def test_original_exception_leaves_unchanged_when_nobody_reads_the_pipe_that_it_is_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(pipe))
    error = ValueError("bad batch")
    assert leaves(error) is error
    report = json.loads(pipe.read_text())
    await_writers()
    assert report["resilience"]["message"] == "bad batch", "whoever opens the pipe late still reads it"


def test_original_exception_leaves_unchanged_when_the_folder_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    error = ValueError("x")
    assert leaves(error) is error
    assert list(tmp_path.iterdir()) == []


def test_original_exception_leaves_unchanged_when_the_path_is_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "error.json"
    folder.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder))
    error = ValueError("x")
    assert leaves(error) is error
    assert list(tmp_path.rglob("*")) == [folder]


def test_original_exception_leaves_unchanged_and_dev_null_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", os.devnull)
    error = ValueError("x")
    assert leaves(error) is error
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("value", [None, ""])
def test_original_exception_leaves_unchanged_when_torch_wants_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if value is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
    error = ValueError("x")
    assert leaves(error) is error
    assert list(tmp_path.iterdir()) == []


def test_exception_is_recorded_when_no_thread_can_be_started(
    error_file: ErrorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    error = ValueError("bad batch")
    assert leaves(error) is error
    assert error_file.ours()["message"] == "bad batch"


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that refuses attributes, those that Python itself sets included."""

    step: int


def test_original_exception_leaves_unchanged_when_it_is_a_frozen_dataclass(error_file: ErrorFile) -> None:
    error = FrozenError(7)
    assert leaves(error) is error


def test_frozen_dataclass_that_refuses_our_mark_is_recorded_all_the_same(error_file: ErrorFile) -> None:
    recording.capture(FrozenError(7))
    assert error_file.ours()["type"].endswith("FrozenError")


def test_frozen_dataclass_leaves_the_in_loop_calls_unchanged() -> None:
    error = FrozenError(7)
    left: BaseException | None = None
    try:
        with resilience.expect_heartbeats(), resilience.section("step"):
            raise error
    except BaseException as caught:  # noqa: BLE001 - whichever it is, it is compared
        left = caught
    assert left is error


class HollowError(Exception):
    """Looks every unknown attribute up in one that is not there, as wrappers do."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_original_exception_leaves_unchanged_when_looking_at_its_attributes_raises(error_file: ErrorFile) -> None:
    error = HollowError("x")
    assert leaves(error) is error
    assert error_file.ours()["message"] == "x"


def test_exception_whose_error_code_raises_is_recorded_without_one(error_file: ErrorFile) -> None:
    class CodedError(Exception):
        @property
        def error_code(self) -> int:
            raise RuntimeError("no code yet")

    error = CodedError("x")
    assert leaves(error) is error
    assert (error_file.ours()["message"], error_file.ours()["error_code"]) == ("x", None)


def test_original_exit_leaves_unchanged_when_its_code_can_not_be_compared(error_file: ErrorFile) -> None:
    class Array:
        """``numpy.array([1, 2])`` and tensors answer ``==`` with something that is neither true nor false."""

        def __eq__(self, other: object) -> Any:
            raise ValueError("the truth value of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    error = SystemExit(Array())
    assert leaves(error) is error
    assert error_file.ours()["type"] == "SystemExit"


# -- what the report says ---------------------------------------------------------------------------------------------


def test_report_replaces_an_older_file_and_leaves_nothing_beside_it(error_file: ErrorFile) -> None:
    error_file.path.write_text("half a rep")
    leaves(ValueError("new"))
    assert error_file.ours()["message"] == "new"
    assert list(error_file.path.parent.iterdir()) == [error_file.path]


def test_report_names_type_bases_rank_cycle_host_and_process(
    error_file: ErrorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("RESILIENCE_CYCLE", "2")

    class BadBatchError(KeyError):
        pass

    leaves(BadBatchError("x"))
    ours = error_file.ours()
    assert ours["type"] == f"{__name__}.{BadBatchError.__qualname__}"
    assert ours["bases"] == ["KeyError", "LookupError", "Exception", "BaseException"]
    assert (ours["rank"], ours["cycle"]) == (3, 2)
    assert (ours["host"], ours["pid"]) == (socket.gethostname(), os.getpid())


def test_report_has_no_rank_where_nobody_gave_one(error_file: ErrorFile) -> None:
    leaves(ValueError("x"))
    assert error_file.ours()["rank"] is None


def test_times_are_of_the_exception_to_the_nanosecond(error_file: ErrorFile) -> None:
    walls, monos = [time.time_ns()], [time.monotonic_ns()]
    leaves(ValueError("x"))
    walls.append(time.time_ns())
    monos.append(time.monotonic_ns())
    ours = error_file.ours()
    assert walls[0] <= ours["wall_ns"] <= walls[1]
    assert monos[0] <= ours["mono_ns"] <= monos[1]
    assert error_file.read()["message"]["extraInfo"]["timestamp"] == str(ours["wall_ns"] // 10**9)


def test_all_causes_are_in_the_report_newest_first(error_file: ErrorFile) -> None:
    @resilience.record
    def main() -> None:
        try:
            try:
                raise OSError("disk gone")
            except OSError:
                raise KeyError("shard") from None
        except KeyError as error:
            try:
                raise ValueError("bad batch") from error
            except ValueError:
                raise RuntimeError("epoch failed")  # noqa: B904 - a context and not a cause

    with pytest.raises(RuntimeError):
        main()
    links = [(link["type"], link["message"]) for link in error_file.ours()["chain"]]
    assert links == [("RuntimeError", "epoch failed"), ("ValueError", "bad batch"), ("KeyError", "'shard'")]
    trace = error_file.read()["message"]["extraInfo"]["py_callstack"]
    assert [name in trace for name in ("epoch failed", "bad batch", "shard", "disk gone")] == [True, True, True, False]


def test_causes_that_go_round_in_a_circle_end(error_file: ErrorFile) -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    leaves(first)
    assert [link["message"] for link in error_file.ours()["chain"]] == ["first", "second"]


def test_cause_that_counts_as_false_is_in_the_report(error_file: ErrorFile) -> None:
    class FailuresError(Exception):
        def __len__(self) -> int:
            return 0

    error = RuntimeError("epoch failed")
    error.__cause__ = FailuresError("none listed")
    leaves(error)
    assert [link["message"] for link in error_file.ours()["chain"]] == ["epoch failed", "none listed"]


def test_report_of_words_without_end_is_bounded(error_file: ErrorFile) -> None:
    resilience.annotate(model="m" * 10_000_000)
    leaves(ValueError("x" * 10_000_000))
    assert len(error_file.ours()["message"]) == recording._TEXT
    assert len(error_file.ours()["context"]["model"]) == recording._SHORT
    assert error_file.path.stat().st_size < 10 * recording._TEXT


def test_report_is_never_larger_than_what_the_launcher_reads_back(error_file: ErrorFile) -> None:
    error = ValueError("ü" * recording._TEXT)
    link: BaseException = error
    for _ in range(2 * recording._CHAIN):
        link.__cause__ = ValueError("ü" * recording._TEXT)
        link = link.__cause__
    leaves(error)
    read = read_by_the_launcher(error_file)
    assert read is not None, f"{error_file.path.stat().st_size} bytes"


@pytest.mark.parametrize("text", ["zwölf", "\udcff", "\0", "a\nb", "雪"])
def test_message_with_odd_characters_is_read_back_as_it_was(error_file: ErrorFile, text: str) -> None:
    leaves(ValueError(text))
    assert error_file.ours()["message"] == text


def test_endless_recursion_is_recorded_with_its_innermost_frames(error_file: ErrorFile) -> None:
    @resilience.record
    def main() -> None:
        def again() -> None:
            again()

        again()

    with pytest.raises(RecursionError):
        main()
    frames = error_file.ours()["frames"]
    assert len(frames) == recording._FRAMES
    assert {frame["function"] for frame in frames} == {"again"}


def test_step_of_the_last_heartbeat_is_in_the_report(error_file: ErrorFile) -> None:
    resilience.heartbeat(41)
    resilience.heartbeat()
    leaves(ValueError("x"))
    assert error_file.ours()["step"] == 41


def test_script_that_told_no_step_has_none_in_its_report(error_file: ErrorFile) -> None:
    leaves(ValueError("x"))
    assert (error_file.ours()["step"], error_file.ours()["sections"]) == (None, [])


def test_sections_that_the_exception_left_are_in_the_report_outermost_first(error_file: ErrorFile) -> None:
    @resilience.record
    def main() -> None:
        with resilience.section("setup"):
            pass
        with resilience.section("epoch"), resilience.section("step"), resilience.section("load"):
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        main()
    sections = error_file.ours()["sections"]
    assert [item["name"] for item in sections] == ["epoch", "step", "load"]
    ages = [item["age_s"] for item in sections]
    assert ages == sorted(ages, reverse=True)
    assert ages[-1] >= 0


def test_section_entered_twice_is_in_the_report_once(error_file: ErrorFile) -> None:
    @resilience.record
    def main() -> None:
        with resilience.section("retry"), resilience.section("retry"):
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        main()
    assert error_file.sections() == ["retry"]


@pytest.mark.parametrize("cause", ["from", "context"])
def test_section_that_only_the_cause_left_is_in_the_report(error_file: ErrorFile, cause: str) -> None:
    @resilience.record
    def main() -> None:
        with resilience.section("epoch"):
            try:
                with resilience.section("load"):
                    raise KeyError("shard")
            except KeyError as error:
                if cause == "from":
                    raise ValueError("bad batch") from error
                raise ValueError("bad batch")  # noqa: B904 - a context and not a cause

    with pytest.raises(ValueError, match="bad batch"):
        main()
    assert error_file.sections() == ["epoch", "load"]


def test_sections_that_are_still_open_are_in_the_report(error_file: ErrorFile) -> None:
    with resilience.section("main"):
        leaves(ValueError("x"))
    assert error_file.sections() == ["main"]


def test_section_that_another_thread_is_in_is_in_the_report(error_file: ErrorFile) -> None:
    with waiting_thread("loader", lambda: resilience.section("prefetch")):
        leaves(ValueError("x"))
    assert error_file.sections() == ["prefetch"]


def test_section_left_in_a_borrowed_row_of_another_thread_is_in_the_report(error_file: ErrorFile) -> None:
    resilience.section("load")  # this thread's row
    errors = []

    def work() -> None:
        with pytest.raises(ValueError, match="bad batch") as caught, resilience.section("load"):
            raise ValueError("bad batch")
        errors.append(caught.value)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    leaves(errors[0])
    assert error_file.sections() == ["load"]


def test_section_that_a_second_attempt_left_has_the_age_of_that_attempt() -> None:
    now, cause, error = time.monotonic_ns(), KeyError("first attempt"), ValueError("second attempt")
    leave_mark(cause, "load", now - 100 * 10**9)
    leave_mark(error, "load", now - 1 * 10**9)
    error.__cause__ = cause
    report = recording.describe(error, None, mono_ns=now, wall_ns=1)
    assert report["resilience"]["sections"] == [{"name": "load", "age_s": 1.0}]


def test_exception_that_went_through_a_section_can_be_compared_and_sent_as_before() -> None:
    error = ValueError("bad batch", 7)
    with contextlib.suppress(ValueError), resilience.section("load"):
        raise error
    assert (str(error), error.args, repr(error)) == (str(ValueError("bad batch", 7)), ("bad batch", 7), repr(error))
    assert client.sections_left_by(error)[0][0] == "load"


def test_exception_object_that_goes_through_sections_again_and_again_does_not_grow() -> None:
    error = ValueError("one for all")
    for _ in range(1000):
        with contextlib.suppress(ValueError), resilience.section("load"):
            raise error
    assert len(client.sections_left_by(error)) <= 64


@contextlib.contextmanager
def waiting_thread(
    name: str, inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
) -> Iterator[None]:
    """Have a thread wait in a function of its own."""
    ready, leave = threading.Event(), threading.Event()

    def waits_for_data() -> None:
        with inside():
            ready.set()
            leave.wait(60)

    thread = threading.Thread(target=waits_for_data, name=name)
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        leave.set()
        thread.join(30)


def test_stacks_of_other_threads_are_in_the_report_and_not_our_own(error_file: ErrorFile) -> None:
    with waiting_thread("loader-7"):
        leaves(ValueError("x"))
    threads = error_file.ours()["threads"]
    assert "Thread loader-7 (most recent call last):" in threads
    assert "in waits_for_data" in threads
    assert "in leaves" not in threads, "the thread that raised has its traceback"
    assert "resilience-record" not in threads


def test_exception_of_a_thread_is_recorded_with_the_stack_of_the_main_thread(error_file: ErrorFile) -> None:
    thread = threading.Thread(target=lambda: leaves(ValueError("in a thread")), name="trainer")
    thread.start()
    thread.join(30)
    assert error_file.ours()["message"] == "in a thread"
    assert "Thread MainThread (most recent call last):" in error_file.ours()["threads"]
    assert "Thread trainer " not in error_file.ours()["threads"]


def test_context_is_in_the_report_with_the_latest_values(error_file: ErrorFile) -> None:
    resilience.annotate(batch="shard-1", lr=0.1, warm=True, seen=3)
    resilience.annotate(batch="shard-2", world=None)
    leaves(ValueError("x"))
    assert error_file.ours()["context"] == {"batch": "shard-2", "lr": 0.1, "warm": True, "seen": 3}


def test_context_that_was_taken_away_is_not_in_the_report(error_file: ErrorFile) -> None:
    resilience.annotate(batch="shard-1", lr=0.1)
    resilience.annotate(batch=None, never_there=None)
    leaves(ValueError("x"))
    assert error_file.ours()["context"] == {"lr": 0.1}


def test_context_is_turned_into_text_only_when_there_is_a_report(error_file: ErrorFile) -> None:
    paths = [Path("a")]
    resilience.annotate(paths=paths)
    paths.append(Path("b"))
    leaves(ValueError("x"))
    assert error_file.ours()["context"] == {"paths": repr(paths)}


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "value", [Mute(), 10**5000, "\udcff", float("nan"), {1: {2}}], ids=lambda value: type(value).__name__
)
def test_context_that_can_not_be_written_does_not_cost_the_report(error_file: ErrorFile, value: Any) -> None:
    resilience.annotate(odd=value, lr=0.1)
    leaves(ValueError("bad batch"))
    assert error_file.ours()["message"] == "bad batch"
    assert error_file.ours()["context"]["lr"] == 0.1


def test_error_code_is_told_by_the_decorator(error_file: ErrorFile) -> None:
    leaves(ValueError("x"), error_code=17)
    assert error_file.ours()["error_code"] == error_file.read()["message"]["errorCode"] == 17


def test_error_code_is_told_by_the_exception(error_file: ErrorFile) -> None:
    class BadNodeError(Exception):
        error_code = 18

    leaves(BadNodeError("x"))
    assert error_file.ours()["error_code"] == error_file.read()["message"]["errorCode"] == 18


def test_error_code_of_the_decorator_comes_before_that_of_the_exception(error_file: ErrorFile) -> None:
    class BadNodeError(Exception):
        error_code = 18

    leaves(BadNodeError("x"), error_code=0)
    assert error_file.ours()["error_code"] == error_file.read()["message"]["errorCode"] == 0


@pytest.mark.parametrize("code", [None, True, "18", 1.5])
def test_error_code_that_is_no_number_is_none(error_file: ErrorFile, code: Any) -> None:
    error = ValueError("x")
    vars(error)["error_code"] = code
    leaves(error)
    assert error_file.ours()["error_code"] is None
    assert "errorCode" not in error_file.read()["message"]


def test_versions_of_what_is_loaded_are_in_the_report(error_file: ErrorFile) -> None:
    torch = pytest.importorskip("torch")
    leaves(ValueError("x"))
    versions = error_file.ours()["versions"]
    assert versions["python"] == platform.python_version()
    assert versions["resilience"] == resilience.__version__
    assert versions["torch"] == str(torch.__version__)
    assert versions["kernel"] == platform.release()


def test_frames_of_python_and_of_packages_are_told_from_those_of_the_user(error_file: ErrorFile) -> None:
    odd: Any = 5

    @resilience.record
    def main() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            frames = recording.describe(error, None, 1, 1)["resilience"]["frames"]
            assert (frames[0]["function"], frames[0]["user"]) == ("main", True)
            assert {frame["user"] for frame in frames[1:]} == {False}, "json is Python's"
        pytest.raises(odd)

    with pytest.raises(TypeError):
        main()
    frames = error_file.ours()["frames"]
    mine = [frame for frame in frames if frame["user"]]
    assert [(frame["function"], frame["file"]) for frame in mine] == [("main", __file__)]
    assert "site-packages" in frames[-1]["file"]
    assert isinstance(mine[0]["line"], int)


def test_frames_of_ours_and_of_text_are_not_the_users(error_file: ErrorFile) -> None:
    @resilience.record
    def main() -> None:
        exec("import resilience\nresilience.section('')")

    with pytest.raises(resilience.ResilienceError):
        main()
    frames = error_file.ours()["frames"]
    assert [frame["function"] for frame in frames if frame["user"]] == ["main"]
    assert "<string>" in [frame["file"] for frame in frames]


def test_traceback_starts_with_the_users_first_frame(error_file: ErrorFile) -> None:
    leaves(ValueError("bad batch"))
    trace = error_file.read()["message"]["extraInfo"]["py_callstack"].splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1].startswith(f'  File "{__file__}", line ')
    assert trace[1].endswith(", in main")
    assert trace[-1] == "ValueError: bad batch"


def test_script_in_a_folder_whose_name_begins_like_ours_keeps_its_frames(error_file: ErrorFile) -> None:
    name = f"{Path(resilience.__file__).parent}_example/train.py"
    space: dict[str, Any] = {"resilience": resilience}
    exec(compile("@resilience.record\ndef main():\n    int('x')\n", name, "exec"), space)
    with pytest.raises(ValueError, match="invalid literal"):
        space["main"]()
    assert f'File "{name}", line 3, in main' in error_file.read()["message"]["extraInfo"]["py_callstack"]
    assert [frame["function"] for frame in error_file.ours()["frames"] if frame["user"]] == ["main"]


# -- torch reads ours, we read torch's --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("bad batch"), Stop("bad batch"), SystemExit("bad batch")])
def test_torch_reads_message_and_time_from_our_file(error_file: ErrorFile, error: BaseException) -> None:
    errors = pytest.importorskip(TORCH_ERRORS)
    leaves(error)
    failure = errors.ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(error_file.path))
    assert failure.message["message"] == f"{type(error).__name__}: bad batch"
    assert failure.timestamp == error_file.ours()["wall_ns"] // 10**9
    shown = errors.ChildFailedError("train.py", {0: failure}).format_msg()
    assert "in main" in shown
    assert f"{type(error).__name__}: bad batch" in shown


def test_file_of_torchs_own_decorator_is_understood(error_file: ErrorFile) -> None:
    errors = pytest.importorskip(TORCH_ERRORS)

    def main() -> NoReturn:
        raise KeyError("shard 7: gone")

    with pytest.raises(KeyError):
        errors.record(main)()
    failure = examine(3, 1, 500, error=error_file.read())
    assert (failure.kind, failure.message) == ("exception", "KeyError: 'shard 7: gone'")
    assert failure.signature == f"KeyError|'shard #: gone'|{__file__}:main"
    assert (failure.rank, failure.at_ns, failure.echo) == (3, 500, False)
    assert "in main" in failure.traceback


def test_our_file_is_understood_with_all_that_torch_leaves_out(error_file: ErrorFile) -> None:
    resilience.heartbeat(41)
    resilience.annotate(batch="shard-7")
    error = ValueError("bad batch 7")
    error.__cause__ = KeyError("x")
    with resilience.section("main"):
        leaves(error, error_code=17)
    failure = examine(3, 1, 500, error=read_by_the_launcher(error_file))
    assert (failure.kind, failure.message, failure.step) == ("exception", "ValueError: bad batch 7", 41)
    assert failure.at_ns == error_file.ours()["mono_ns"]
    assert failure.signature == f"ValueError|bad batch #|{__file__}:main"
    assert (failure.error_code, dict(failure.context)) == (17, {"batch": "shard-7"})
    assert [item["name"] for item in failure.sections] == ["main"]
    assert [link["type"] for link in failure.chain] == ["ValueError", "KeyError"]
    assert failure.versions["python"] == platform.python_version()


def checkpoint_failure() -> BaseException:
    api = pytest.importorskip("torch.distributed.checkpoint.api")
    try:
        raise OSError("no space left on device")
    except OSError as error:
        failed: BaseException = api.CheckpointException("save", {1: api._wrap_exception(error)})
        return failed


def test_checkpoint_exception_that_torchs_own_decorator_misses_is_recorded(error_file: ErrorFile) -> None:
    errors = pytest.importorskip(TORCH_ERRORS)
    error = checkpoint_failure()

    def main() -> NoReturn:
        raise error

    with pytest.raises(type(error)):
        errors.record(main)()
    assert not error_file.path.exists(), "torch records it now: this test has served"
    assert leaves(error) is error
    assert error_file.ours()["type"] == "torch.distributed.checkpoint.api.CheckpointException"
    assert "no space left on device" in error_file.ours()["message"]
    assert error_file.read()["message"]["message"].startswith("CheckpointException: CheckpointException ranks:")


def test_failure_of_a_child_is_handed_on_in_the_childs_own_words(
    error_file: ErrorFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = pytest.importorskip(TORCH_ERRORS)
    child = ErrorFile(tmp_path / "child.json")
    with monkeypatch.context() as inside:
        inside.setenv("TORCHELASTIC_ERROR_FILE", str(child.path))
        leaves(ValueError("bad batch"))
    failure = errors.ProcessFailure(local_rank=0, pid=1, exitcode=-11, error_file=str(child.path))
    error = errors.ChildFailedError("trainer", {0: failure})
    assert leaves(error) is error
    assert error_file.ours() == child.ours()
    assert error_file.read()["message"]["message"] == "ValueError: bad batch"
    assert error_file.read()["message"]["errorCode"] == -11


@pytest.mark.parametrize("left", [None, "half a rep"])
def test_failure_of_a_child_that_left_no_words_is_told_in_ours(
    error_file: ErrorFile, tmp_path: Path, left: str | None
) -> None:
    errors = pytest.importorskip(TORCH_ERRORS)
    child = tmp_path / "child.json"
    failure = errors.ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file=str(child))
    if left is not None:
        child.write_text(left)
        failure.error_file = str(child)
    error = errors.ChildFailedError("trainer", {0: failure})
    assert leaves(error) is error
    assert error_file.ours()["type"] == f"{TORCH_ERRORS}.ChildFailedError"
    assert "Signal 9 (SIGKILL) received by PID 1" in error_file.ours()["message"]


# -- in a process of its own ------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import resilience

class Stop(BaseException):
    pass

@resilience.record
def main():
    resilience.heartbeat(41)
    with resilience.section("load"):
        {fault}

main()
"""


def run(tmp_path: Path, launcher: list[str], fault: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(fault=fault))
    drop = ("RESILIENCE_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    if not launcher:
        environment["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=150,
    )


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("fault", "code", "said", "shown"),
    [
        ("raise ValueError('bad batch')", 1, "ValueError: bad batch", "ValueError: bad batch"),
        ("raise Stop('bad batch')", 1, "Stop: bad batch", "Stop: bad batch"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt: ", "KeyboardInterrupt"),
        ("sys.exit(3)", 3, "SystemExit: 3", ""),
        ("sys.exit('no data')", 1, "SystemExit: no data", "no data"),
    ],
)
def test_script_under_plain_python_ends_as_ever_and_leaves_its_report(
    tmp_path: Path, fault: str, code: int, said: str, shown: str
) -> None:
    ended = run(tmp_path, [], fault)
    assert ended.returncode == code, ended.stderr
    assert (ended.stdout, ended.stderr.rstrip().rpartition("\n")[2]) == ("", shown)
    error_file = ErrorFile(tmp_path / "error.json")
    assert error_file.read()["message"]["message"] == said
    assert (error_file.ours()["step"], error_file.sections()) == (41, ["load"])
    assert "torch" not in error_file.ours()["versions"], "a report imports nothing"


@pytest.mark.spawns
def test_script_whose_report_can_not_be_written_in_time_still_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "error.json")
    ended = run(tmp_path, [], "import resilience.recording as r; r.DEADLINE_S = 0.05; raise ValueError('bad batch')")
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("ValueError: bad batch"), ended.stderr


@pytest.mark.spawns
@pytest.mark.parametrize("kind", ["ValueError", "Stop"])
def test_torchrun_shows_our_message_in_its_own_report(tmp_path: Path, kind: str) -> None:
    pytest.importorskip(TORCH_ERRORS)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=1", "--standalone", f"--log-dir={tmp_path / 'logs'}"]
    ended = run(tmp_path, launcher, f"raise {kind}('bad batch')")
    assert ended.returncode == 1
    _, mark, report = ended.stderr.partition("Root Cause (first observed failure):")
    assert mark, ended.stderr
    assert "traceback : Traceback (most recent call last):" in report
    assert "in main" in report
    assert f"{kind}: bad batch" in report
    assert "error_file: <N/A>" not in report
