from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest

import resilience
from resilience.errors import PulseError, SectionError
from resilience.pulse import client
from resilience.pulse.client import end_all_sections, expect_heartbeats, heartbeat, section
from resilience.pulse.page import MAX_ROWS, PageView, Row
from resilience.pulse.writer import Pulse
from tests.fakes import FakeClock, S, at


def read(pulse: Pulse) -> PageView:
    return pulse.page.read()


def only(pulse: Pulse, name: str) -> Row:
    (row,) = [row for row in read(pulse).rows if row.name == name]
    return row


def open_names(pulse: Pulse) -> list[str]:
    return [row.name for row in read(pulse).open_rows()]


def in_a_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


# -- heartbeats -------------------------------------------------------------------------------------------------------


def test_first_heartbeat_adopts_the_script_and_expects_more(pulse: Pulse, clock: FakeClock) -> None:
    heartbeat()
    view = read(pulse)
    assert view.adopted
    assert view.first_sign == view.expected_since == view.beat_at == clock.now
    assert (view.beats, view.step) == (1, None)


def test_heartbeat_tells_the_step_and_a_later_one_without_keeps_it(pulse: Pulse) -> None:
    heartbeat(41)
    heartbeat(step=42)
    heartbeat()
    assert (read(pulse).step, read(pulse).beats) == (42, 3)


def test_largest_gap_is_kept_with_the_first_three_apart(pulse: Pulse, clock: FakeClock) -> None:
    for gap in (500.0, 400.0, 300.0, 200.0, 1.0, 7.0, 2.0):
        clock.wait(gap)
        heartbeat()
    gaps = read(pulse).gaps
    assert (gaps.samples, gaps.largest, gaps.warmup) == (3, 7 * S, 400 * S)


@pytest.mark.parametrize("step", [-1, 1.5, "3", 1 << 64, math.nan, [1]])
def test_step_that_is_no_whole_number_raises_and_sends_nothing(pulse: Pulse, step: Any) -> None:
    heartbeat(5)
    with pytest.raises(PulseError, match=r"whole number from 0 up. No heartbeat was sent"):
        heartbeat(step)
    assert (read(pulse).beats, read(pulse).step) == (1, 5)


def test_anything_with_an_index_is_a_step(pulse: Pulse) -> None:
    class Counter:
        def __index__(self) -> int:
            return 17

    heartbeat(Counter())  # type: ignore[arg-type]  # numpy's and torch's integers look like this
    assert read(pulse).step == 17


def test_expected_heartbeats_include_the_first_and_end_with_the_block(pulse: Pulse, clock: FakeClock) -> None:
    with expect_heartbeats():
        assert (read(pulse).expected_since, read(pulse).done_since, read(pulse).beats) == (clock.now, 0, 0)
        assert read(pulse).adopted
        clock.wait(5)
    assert (read(pulse).expected_since, read(pulse).done_since) == (0, at(5))


def test_block_ends_when_an_exception_leaves_it(pulse: Pulse) -> None:
    with pytest.raises(RuntimeError, match="boom"), expect_heartbeats():
        raise RuntimeError("boom")
    assert read(pulse).expected_since == 0


def test_timeout_of_expected_heartbeats_is_seconds_timedelta_or_none(pulse: Pulse) -> None:
    cases: list[tuple[client.Timeout, float | None]]
    cases = [(60, 60.0), (timedelta(minutes=2), 120.0), (math.inf, math.inf), (None, None)]
    for timeout, seen in cases:
        with expect_heartbeats(timeout):
            assert read(pulse).beat_timeout == seen


def test_second_expectation_takes_back_that_the_loop_was_done(pulse: Pulse) -> None:
    with expect_heartbeats():
        heartbeat(1)
    with expect_heartbeats():
        assert read(pulse).done_since == 0
        assert read(pulse).expected_since


def test_pause_between_two_loops_is_no_gap_between_heartbeats(pulse: Pulse, clock: FakeClock) -> None:
    with expect_heartbeats():
        for step in range(10):
            heartbeat(step)
            clock.wait(1)
    clock.wait(10_000)
    with expect_heartbeats():
        clock.wait(2)
        heartbeat(10)
    assert read(pulse).gaps.largest == 2 * S


def test_done_ends_the_expectation(pulse: Pulse, clock: FakeClock) -> None:
    heartbeat(1)
    resilience.done()
    assert (read(pulse).expected_since, read(pulse).done_since) == (0, clock.now)


# -- sections ---------------------------------------------------------------------------------------------------------


def test_section_is_open_inside_its_block_only(pulse: Pulse, clock: FakeClock) -> None:
    with section("load"):
        assert only(pulse, "load").open_since == clock.now
        clock.wait(3)
    row = only(pulse, "load")
    assert (row.open_since, row.closed_at, row.last, row.entries) == (0, clock.now, 3 * S, 1)


def test_section_closes_when_an_exception_leaves_it_and_the_exception_goes_on(pulse: Pulse) -> None:
    with pytest.raises(KeyError), section("load"):
        raise KeyError("x")
    assert open_names(pulse) == []


def test_decorated_function_runs_inside_its_section(pulse: Pulse) -> None:
    seen: list[list[str]] = []

    @section("train")
    def train(a: int, *, b: int) -> int:
        """Do it."""
        seen.append(open_names(pulse))
        return a + b

    assert train(1, b=2) == 3
    assert seen == [["train"]]
    assert open_names(pulse) == []
    assert (train.__name__, train.__doc__) == ("train", "Do it.")


def test_function_decorated_before_there_is_a_page_is_watched_afterwards(
    monkeypatch: pytest.MonkeyPatch, pulse: Pulse
) -> None:
    with monkeypatch.context() as before:
        before.setattr(client, "_here", client._Process())
        before.setattr(client._here, "_looked", True)

        @section("train")
        def train() -> list[str]:
            return open_names(pulse)

    assert train() == ["train"]


def test_decorated_coroutine_is_inside_while_it_runs_and_not_before(pulse: Pulse) -> None:
    @section("fetch")
    async def fetch() -> list[str]:
        await asyncio.sleep(0)
        return open_names(pulse)

    coroutine = fetch()
    assert open_names(pulse) == []
    assert asyncio.run(coroutine) == ["fetch"]
    assert open_names(pulse) == []


def test_sections_nest_and_every_open_one_shows(pulse: Pulse, clock: FakeClock) -> None:
    with section("epoch"):
        clock.wait(1)
        with section("step"):
            assert open_names(pulse) == ["epoch", "step"]
        assert open_names(pulse) == ["epoch"]


def test_section_entered_again_while_open_counts_from_its_outermost_entry(pulse: Pulse, clock: FakeClock) -> None:
    with section("retry"):
        clock.wait(5)
        with section("retry"):
            clock.wait(5)
            assert only(pulse, "retry").open_since == at(0)
        assert only(pulse, "retry").open_since == at(0)
    assert (only(pulse, "retry").entries, only(pulse, "retry").last) == (1, 10 * S)


def test_timeout_holds_for_the_name_until_another_is_given(pulse: Pulse) -> None:
    with section("save", timeout=600):
        pass
    with section("save"):
        assert only(pulse, "save").timeout == 600.0
    with section("save", timeout=timedelta(hours=1)):
        assert only(pulse, "save").timeout == 3600.0
    with section("save", timeout=math.inf):
        assert only(pulse, "save").timeout == math.inf


def test_timeout_holds_for_the_name_in_other_threads_too(pulse: Pulse) -> None:
    seen: list[float | None] = []
    section("save", timeout=600)  # by the main thread, or by a decorator at import

    def work() -> None:
        with section("save"):
            seen.extend(row.timeout for row in read(pulse).open_rows())

    in_a_thread(work)
    assert seen == [600.0]


@pytest.mark.parametrize("timeout", [True, False, math.nan, 0, -1, 0.0, -math.inf, timedelta(0), "5", timedelta(-1)])
def test_timeout_that_can_not_be_meant_raises_with_or_without_a_launcher(pulse: Pulse, timeout: Any) -> None:
    with pytest.raises(PulseError, match=r"give positive seconds or a timedelta, None for learned, math.inf for none"):
        section("load", timeout=timeout)
    with pytest.raises(PulseError, match=r"give positive seconds"), expect_heartbeats(timeout):
        pass


@pytest.mark.usefixtures("alone")
def test_timeout_that_can_not_be_meant_raises_without_a_launcher_too() -> None:
    with pytest.raises(PulseError, match=r"give positive seconds"):
        section("load", timeout=-1)
    with pytest.raises(PulseError, match=r"give positive seconds"), expect_heartbeats(0):
        pass


@pytest.mark.parametrize("name", ["", "x" * 65, "ü" * 33, "a\0b"])
def test_name_that_does_not_fit_the_page_raises(pulse: Pulse, name: str) -> None:
    with pytest.raises(SectionError, match=r"a name has 1 to 64 bytes.*the section was not opened"):
        section(name)
    assert read(pulse).rows == ()


@pytest.mark.parametrize("name", [None, 7, b"load", ["load"]])
def test_name_that_is_no_string_raises(pulse: Pulse, name: Any) -> None:
    with pytest.raises(PulseError, match="the name must be a string"):
        section(name)


def test_name_that_is_no_unicode_raises_our_error(pulse: Pulse) -> None:
    with pytest.raises(SectionError):
        section("\ud800")


def test_decorator_without_a_name_says_how_it_is_written(pulse: Pulse) -> None:
    with pytest.raises(PulseError, match=r"@section\('name'\)"):

        @section  # type: ignore[arg-type]
        def train() -> None: ...


def test_names_with_a_step_number_raise_with_the_hint(pulse: Pulse) -> None:
    for step in range(MAX_ROWS):
        with section(f"step {step}"):
            pass
    with pytest.raises(SectionError, match=r"number 65.*step or batch number in the name.*heartbeat\(step\)"):
        section("step 64")
    with section("step 3"):  # those that are known still work
        assert open_names(pulse) == ["step 3"]


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_in_one_section_are_seen_one_by_one(pulse: Pulse) -> None:
    inside = threading.Barrier(4)
    leave = threading.Event()

    def work() -> None:
        with section("load"):
            inside.wait(10)
            leave.wait(10)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    with section("load"):
        assert open_names(pulse) == ["load"] * 4
    assert open_names(pulse) == ["load"] * 3
    leave.set()
    for thread in threads:
        thread.join(10)
    assert open_names(pulse) == []


def test_one_stuck_thread_keeps_its_section_open_while_others_come_and_go(pulse: Pulse, clock: FakeClock) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck() -> None:
        with section("load"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=stuck)
    thread.start()
    assert entered.wait(10)
    clock.wait(100)
    for _ in range(5):
        with section("load"):
            clock.wait(1)
    (row,) = read(pulse).open_rows()
    assert row.open_since == at(0)
    leave.set()
    thread.join(10)


def test_thread_churn_does_not_exhaust_the_table(pulse: Pulse) -> None:
    section("load")

    def work() -> None:
        with section("load"):
            pass

    keep = []
    for _ in range(3 * MAX_ROWS):
        # Threads that stay alive keep their identities from being given out again.
        ready, leave = threading.Event(), threading.Event()

        def stay(ready: threading.Event = ready, leave: threading.Event = leave) -> None:
            work()
            ready.set()
            leave.wait(30)

        thread = threading.Thread(target=stay)
        thread.start()
        assert ready.wait(10)
        keep.append((thread, leave))
    for thread, leave in keep:
        leave.set()
        thread.join(10)
    assert len(read(pulse).rows) == 2


def test_section_made_by_a_thread_that_is_gone_still_works(pulse: Pulse) -> None:
    in_a_thread(lambda: section("load").__enter__().leave())
    with section("load"):
        assert open_names(pulse) == ["load"]
    assert open_names(pulse) == []


# -- end_all_sections -------------------------------------------------------------------------------------------------


def test_all_sections_end_and_their_blocks_leave_quietly(pulse: Pulse, clock: FakeClock) -> None:
    with section("epoch"), section("step"), section("step"):
        clock.wait(2)
        end_all_sections()
        assert open_names(pulse) == []
        clock.wait(5)
    assert only(pulse, "step").last == 2 * S
    assert only(pulse, "step").entries == 1
    with section("step"):
        assert open_names(pulse) == ["step"]


def test_sections_of_other_threads_end_and_their_rows_are_used_again(pulse: Pulse) -> None:
    section("load")
    entered, ended, left, stop = (threading.Semaphore(0) for _ in range(4))

    def work() -> None:
        with section("load"):
            entered.release()
            ended.acquire(timeout=10)
        left.release()
        stop.acquire(timeout=30)  # a thread that stays keeps its identity from being given out again

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
        assert entered.acquire(timeout=10)
        end_all_sections()
        assert open_names(pulse) == []
        ended.release()
        assert left.acquire(timeout=10)
    for _ in threads:
        stop.release()
    for thread in threads:
        thread.join(10)
    assert len(read(pulse).rows) == 2, "a row was lost every time"


# -- gaps between sections --------------------------------------------------------------------------------------------


def test_time_between_sections_is_learned_with_the_first_three_apart(pulse: Pulse, clock: FakeClock) -> None:
    for pause in (90.0, 80.0, 70.0, 2.0, 4.0, 3.0, 0.0):
        with section("step"):
            clock.wait(50)
        clock.wait(pause)
    outside = read(pulse).pauses
    assert (outside.samples, outside.largest, outside.warmup) == (3, 4 * S, 90 * S)


def test_time_between_inner_sections_of_an_open_one_is_not_out_of_section(pulse: Pulse, clock: FakeClock) -> None:
    with section("epoch"):
        for _ in range(30):
            with section("step"):
                clock.wait(1)
            clock.wait(1)
    assert read(pulse).pauses.samples == 0


# -- without a launcher -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_without_a_launcher_calls_do_nothing_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "resilience")
    for step in range(3):
        heartbeat(step)
        with section("step"), expect_heartbeats():
            end_all_sections()
    resilience.done()
    client.finish()
    (record,) = [record for record in caplog.records if record.name.startswith("resilience")]
    assert record.levelno == logging.DEBUG
    assert "resilience run" in record.getMessage()


@pytest.mark.usefixtures("alone")
def test_without_a_launcher_mistakes_raise_as_they_would_with_one() -> None:
    code = (
        "from resilience import heartbeat, section\n"
        "for step in range(200):\n    with section(f'step {step}'): heartbeat(step)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "SectionError" in done.stderr
    assert "keep the name constant" in done.stderr


# -- fork -------------------------------------------------------------------------------------------------------------

_FORK = """
import os, sys
import resilience
from resilience.pulse import client
from resilience.pulse.page import Page
from resilience.pulse.writer import Pulse

page = Page.create(0)
client._here.pulse, client._here._looked = Pulse(page), True

@resilience.section("decorated")
def decorated():
    pass

held = resilience.section("held")
with resilience.expect_heartbeats(), held:
    resilience.heartbeat(1)
    before = bytes(page.words)
    pid = os.fork()
    if pid == 0:
        for step in range(5):
            resilience.heartbeat(100 + step)
        with held, resilience.section("child's"), resilience.expect_heartbeats(5):
            decorated()
        resilience.end_all_sections()
        resilience.done()
        client.finish()
        held.leave()
        os._exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    assert bytes(page.words) == before, "the child wrote its parent's page"
    resilience.heartbeat(2)
    decorated()
    assert page.read().step == 2 and bytes(page.words) != before, "the parent went silent"
print("held")
"""


@pytest.mark.spawns
def test_forked_child_never_writes_its_parents_page() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "held"), done.stderr
