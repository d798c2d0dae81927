from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from resilience.monitor.verdict import FINE, HANG, WARN, Life, Verdict, learned_from, verdict
from resilience.pulse.page import Page, PageView, Seen
from resilience.pulse.timeouts import Samples, Timeouts
from resilience.pulse.writer import Pulse
from tests.fakes import START, FakeClock, S, at, beating, learned, row, view, writer_time

LIFE = Life(START)
ADOPTED = Life(START, adopted=True)


def judge(seen: PageView, timeouts: Timeouts, now: float, life: Life = LIFE) -> Verdict:
    return verdict(seen, timeouts, at(now), life)


def hangs(seen: PageView, timeouts: Timeouts, deadline: float, clock: str, life: Life = LIFE) -> None:
    """Assert that the rank is fine until ``deadline``, that this is known, and that then ``clock`` says it hangs."""
    before = judge(seen, timeouts, deadline - 0.001, life)
    assert before.kind == FINE
    assert before.next_ns == pytest.approx(at(deadline))
    after = judge(seen, timeouts, deadline, life)
    assert after.kind == HANG
    assert after.clock is not None
    assert after.clock.name == clock


# -- before the first sign of life ------------------------------------------------------------------------------------


def test_script_that_never_calls_us_is_warned_about_and_not_ended() -> None:
    warned = judge(view(), Timeouts(), 1800)
    assert warned.kind == WARN
    assert math.isinf(warned.next_ns)
    assert judge(view(), Timeouts(), 1799).kind == FINE
    assert judge(view(), Timeouts(), 1_000_000).kind == WARN


def test_script_that_never_calls_us_is_ended_when_the_timeout_was_given() -> None:
    hangs(view(), Timeouts(given={"initial": (60.0, "flag")}), 60, "initial")


def test_silent_rank_is_ended_when_another_rank_has_called_us() -> None:
    hangs(view(), Timeouts(), 1800, "initial", ADOPTED)
    hangs(view(), learned(initial=20.0), 100, "initial", ADOPTED)


def test_process_that_never_came_to_attach_is_judged_too() -> None:
    hangs(view(attached=False, attached_at=0, pid=0), Timeouts(), 1800, "initial", ADOPTED)


def test_given_no_initial_timeout_waits_for_ever() -> None:
    assert judge(view(), Timeouts(given={"initial": (math.inf, "flag")}), 1e9, ADOPTED).kind == FINE


# -- heartbeats -------------------------------------------------------------------------------------------------------


def test_heartbeat_that_stays_away_is_a_hang() -> None:
    hangs(beating(100), learned(heartbeat=1.0), 130, "heartbeat")
    hangs(beating(100), learned(heartbeat=20.0), 200, "heartbeat")
    hangs(beating(100), Timeouts(), 1900, "heartbeat")
    hangs(beating(100), Timeouts(given={"heartbeat": (4.0, "environment")}), 104, "heartbeat")


def test_first_heartbeat_that_stays_away_is_a_hang() -> None:
    waiting = view(adopted=True, first_sign=at(10), expected_since=at(10))
    hangs(waiting, learned(heartbeat=1.0), 40, "heartbeat")


def test_timeout_of_the_block_wins_over_all_others() -> None:
    timeouts = Timeouts(given={"heartbeat": (500.0, "flag")})
    hangs(beating(100, beat_timeout=7.0), timeouts, 107, "heartbeat")
    assert judge(beating(100, beat_timeout=math.inf), timeouts, 1e9).kind == FINE


def test_heartbeats_before_the_first_sixteen_have_the_long_timeout_and_after_a_restart_that_of_warm_up() -> None:
    compiled = Timeouts(learned={"heartbeat": Samples(100, 1.0, 120.0)})
    hangs(beating(100, gaps=Seen(0, 0, S), beats=2), compiled, 700, "heartbeat")
    hangs(beating(100, gaps=Seen(1, S, S), beats=5), compiled, 130, "heartbeat")


def test_script_without_heartbeats_has_no_heartbeat_clock() -> None:
    stepping = view(adopted=True, first_sign=at(1), rows=(row("step", open_since=at(50)),))
    assert judge(stepping, learned(heartbeat=1.0), 1000).kind == FINE


# -- sections ---------------------------------------------------------------------------------------------------------


def sections(**changes: Any) -> PageView:
    return view(**{"adopted": True, "first_sign": at(1), **changes})


def test_section_that_does_not_end_is_a_hang() -> None:
    stuck = sections(rows=(row("step", open_since=at(50)),))
    hangs(stuck, learned(section_step=2.0), 80, "section:step")
    hangs(stuck, learned(section_step=20.0), 150, "section:step")
    hangs(stuck, Timeouts(), 1850, "section:step")
    hangs(stuck, Timeouts(given={"section:step": (3.0, "flag")}), 53, "section:step")


def test_timeout_given_in_code_wins_for_its_section() -> None:
    stuck = sections(rows=(row("step", open_since=at(50), timeout=5.0),))
    hangs(stuck, Timeouts(given={"section:step": (500.0, "flag")}), 55, "section:step")


def test_outer_section_is_judged_while_the_inner_one_is_fine() -> None:
    nested = sections(rows=(row("step", open_since=at(999)), row("epoch", open_since=at(10))))
    hangs(nested, learned(section_step=1.0, section_epoch=200.0), 1010, "section:epoch")


def test_inner_section_is_judged_while_the_outer_one_has_no_timeout() -> None:
    nested = sections(rows=(row("epoch", open_since=at(10), timeout=math.inf), row("step", open_since=at(99))))
    hangs(nested, learned(section_step=1.0), 129, "section:step")


def test_each_thread_in_a_section_is_judged() -> None:
    both = sections(rows=(row("load", open_since=at(500)), row("load", open_since=at(400))))
    hangs(both, learned(section_load=1.0), 430, "section:load")


def test_hang_in_a_section_is_found_although_heartbeats_come_from_elsewhere() -> None:
    elsewhere = beating(1000, rows=(row("load", open_since=at(980)),))
    hangs(elsewhere, learned(section_load=1.0, heartbeat=1.0), 1010, "section:load")


def test_section_in_warm_up_gets_the_time_that_warm_up_ever_took() -> None:
    timeouts = Timeouts(learned={"section:step": Samples(100, 1.0, 300.0)})
    hangs(sections(rows=(row("step", open_since=at(50), seen=Seen()),)), timeouts, 1550, "section:step")
    hangs(sections(rows=(row("step", open_since=at(50), seen=Seen(1)),)), timeouts, 80, "section:step")


# -- between sections -------------------------------------------------------------------------------------------------


def test_time_outside_any_section_is_judged() -> None:
    outside = sections(rows=(row("step", closed_at=at(100)), row("load", closed_at=at(90))))
    hangs(outside, learned(out_of_section=1.0), 130, "out-of-section")
    hangs(outside, Timeouts(), 1900, "out-of-section")
    hangs(outside, Timeouts(given={"out-of-section": (2.0, "flag")}), 102, "out-of-section")


def test_open_section_stops_the_clock_between_sections() -> None:
    inside = sections(rows=(row("step", closed_at=at(100), open_since=at(101), timeout=math.inf),))
    assert judge(inside, learned(out_of_section=1.0), 1e6).kind == FINE


def test_rank_that_beats_is_not_hung_because_its_last_section_was_long_ago() -> None:
    # section("setup") once, then a loop of heartbeats; or an evaluation every few hours.
    alive = beating(7199, rows=(row("setup", closed_at=at(1), seen=Seen()),))
    assert judge(alive, Timeouts(), 7200).kind == FINE
    assert judge(alive, learned(heartbeat=1.0), 7200).kind == FINE


# -- after the loop ---------------------------------------------------------------------------------------------------


def test_rank_that_does_not_end_after_its_loop_is_a_hang() -> None:
    done = sections(done_since=at(100), rows=(row("step", closed_at=at(99)),))
    hangs(done, learned(out_of_section=1.0), 1900, "exit")
    hangs(done, Timeouts(given={"exit": (60.0, "flag")}), 160, "exit")


def test_section_after_the_loop_is_judged_and_puts_the_exit_off() -> None:
    saving = sections(done_since=at(100), rows=(row("save", open_since=at(150)),))
    hangs(saving, learned(section_save=60.0), 450, "section:save")
    saved = sections(done_since=at(100), rows=(row("save", closed_at=at(400)),))
    hangs(saved, Timeouts(given={"exit": (60.0, "flag")}), 460, "exit")


def test_given_time_between_sections_holds_after_the_loop_too() -> None:
    done = sections(done_since=at(100), rows=(row("step", closed_at=at(99)),))
    hangs(done, Timeouts(given={"out-of-section": (20.0, "flag")}), 119, "out-of-section")


def test_rank_that_beats_on_after_its_loop_was_done_is_not_hung() -> None:
    # RankMonitorClient: shutdown, then initialised again for a second phase of training.
    again = beating(9_999, expected_since=0, done_since=at(100))
    assert judge(again, Timeouts(), 10_000).kind == FINE


def test_script_that_has_returned_must_end_whatever_else_it_left_open() -> None:
    returned = beating(90, finishing_since=at(100), rows=(row("step", open_since=at(50)),))
    hangs(returned, Timeouts(given={"exit": (10.0, "flag"), "heartbeat": (1.0, "flag")}), 110, "exit")


def test_between_done_and_exit_no_heartbeat_is_missed() -> None:
    assert judge(sections(done_since=at(100), beats=9, beat_at=at(99)), learned(heartbeat=1.0), 1000).kind == FINE


# -- a learned heartbeat timeout and time in sections -----------------------------------------------------------------


def test_learned_heartbeat_clock_does_not_count_an_open_section_entered_since() -> None:
    evaluating = beating(100, rows=(row("evaluate", open_since=at(110), seen=Seen()),))
    hangs(evaluating, learned(heartbeat=1.0), 1910, "section:evaluate")


def test_learned_heartbeat_clock_does_not_count_a_section_left_since() -> None:
    evaluated = beating(100, inside=600 * S, rows=(row("evaluate", closed_at=at(710), last=600 * S),))
    hangs(evaluated, learned(heartbeat=1.0), 730, "heartbeat")


def test_learned_heartbeat_clock_does_not_count_a_section_entered_twice_since() -> None:
    # for split in ("validation", "test"): with section("evaluate"): …
    page, clock = Page.create(0), FakeClock()
    with writer_time(clock):
        pulse = Pulse(page)
        beat_often(pulse, clock)
        evaluate = pulse.borrow("evaluate")
        for _ in range(3):
            evaluate.enter()
            clock.wait(60)
            evaluate.leave()
        assert verdict(page.read(), learned(heartbeat=1.0), clock.now, LIFE).kind == FINE
    os.close(page.fd)


@pytest.mark.parametrize(("timeout", "seconds"), [(math.nan, 60.0), (3 * 3600.0, 2 * 3600.0), (math.inf, 86_400.0)])
@pytest.mark.parametrize("outer", [False, True])
def test_learned_heartbeat_clock_does_not_count_a_section_however_long_or_nested(
    outer: bool, timeout: float, seconds: float
) -> None:
    page, clock = Page.create(0), FakeClock()
    with writer_time(clock):
        pulse = Pulse(page)
        if outer:  # with section("epoch"): around the whole loop
            epoch = pulse.borrow("epoch")
            epoch.limit(math.inf)
            epoch.enter()
        beat_often(pulse, clock)
        evaluate = pulse.borrow("evaluate")
        evaluate.limit(timeout)
        evaluate.enter()
        clock.wait(seconds)
        assert verdict(page.read(), learned(heartbeat=1.0), clock.now, LIFE).kind == FINE
        evaluate.leave()
        clock.wait(1)  # the next step, up to its heartbeat
        assert verdict(page.read(), learned(heartbeat=1.0), clock.now, LIFE).kind == FINE
        clock.wait(40)
        assert verdict(page.read(), learned(heartbeat=1.0), clock.now, LIFE).kind == HANG
    os.close(page.fd)


def test_learned_heartbeat_clock_counts_a_section_entered_before() -> None:
    training = beating(100, rows=(row("epoch", open_since=at(50), timeout=math.inf),))
    hangs(training, learned(heartbeat=1.0), 130, "heartbeat")


def test_section_without_a_timeout_has_no_heartbeat_timeout_either_unless_one_was_given() -> None:
    shell = beating(100, rows=(row("debug", open_since=at(110), timeout=math.inf),))
    assert judge(shell, learned(heartbeat=1.0), 1e9).kind == FINE
    hangs(shell, Timeouts(given={"heartbeat": (9.0, "flag")}), 109, "heartbeat")


@pytest.mark.parametrize(
    "rows", [(row("evaluate", open_since=at(101)),), (row("evaluate", closed_at=at(105), last=4 * S),)]
)
def test_given_heartbeat_timeout_counts_time_in_sections(rows: tuple[Any, ...]) -> None:
    given = Timeouts(given={"heartbeat": (10.0, "flag")})
    hangs(beating(100, rows=rows), given, 110, "heartbeat")
    hangs(beating(100, rows=rows, beat_timeout=10.0), Timeouts(), 110, "heartbeat")


@pytest.mark.parametrize("seed", range(200))
def test_verdict_names_the_section_and_not_the_heartbeat_that_waits_for_it(seed: int) -> None:
    rng = random.Random(seed)
    boot = rng.randint(0, 1 << 56)  # years of uptime: beyond what a float holds to the nanosecond
    beat, opened = boot + rng.randint(1, 10**12), boot + rng.randint(10**12 + 1, 10**13)
    seen = view(
        first_sign=boot,
        expected_since=boot,
        beat_at=beat,
        gaps=Seen(9, S, S),
        rows=(row("evaluate", open_since=opened, seen=Seen()),),
    )
    judged = verdict(seen, learned(heartbeat=1.0), opened + rng.randint(1801, 2000) * S, Life(boot))
    assert judged.clock is not None
    assert judged.clock.name == "section:evaluate"


# -- a monitor that was stopped itself --------------------------------------------------------------------------------


def test_no_clock_counts_the_time_in_which_the_monitor_was_stopped() -> None:
    frozen = beating(100, rows=(row("step", open_since=at(99)),))
    timeouts = learned(heartbeat=1.0, section_step=1.0)
    assert judge(frozen, timeouts, 3700).kind == HANG
    hangs(frozen, timeouts, 3730, "section:step", Life(START, resumed_ns=at(3700)))
    assert judge(view(), timeouts, 3700, Life(START, resumed_ns=at(3700), adopted=True)).kind == FINE


# -- several clocks ---------------------------------------------------------------------------------------------------


def test_next_look_is_at_the_earliest_deadline() -> None:
    busy = beating(100, rows=(row("epoch", open_since=at(10)), row("step", open_since=at(105), timeout=100.0)))
    assert judge(busy, learned(heartbeat=1.0, section_epoch=1000.0), 106).next_ns == at(205)
    given = Timeouts(given={"heartbeat": (50.0, "flag"), "section:epoch": (400.0, "flag")})
    assert judge(busy, given, 106).next_ns == at(150)


def test_verdict_is_the_clock_that_expired_first() -> None:
    busy = beating(100, rows=(row("epoch", open_since=at(10), timeout=200.0), row("step", open_since=at(105))))
    judged = judge(busy, Timeouts(given={"section:step": (200.0, "flag")}), 5000)
    assert judged.clock is not None
    assert (judged.clock.name, judged.clock.deadline_ns) == ("section:epoch", at(210))


def test_no_timeout_anywhere_is_never_a_hang() -> None:
    names = ("initial", "heartbeat", "out-of-section", "exit", "section:step")
    none = Timeouts(given=dict.fromkeys(names, (math.inf, "flag")))
    for seen in (view(), beating(1), sections(rows=(row("step", open_since=at(1)),)), sections(done_since=at(3))):
        judged = judge(seen, none, 1e9, ADOPTED)
        assert (judged.kind, judged.next_ns) == (FINE, math.inf)


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (view(), "no heartbeat or section since the process started for 4000.0 s (timeout 1800 s, unlearned)"),
        (beating(100), "no heartbeat for 3900.0 s (timeout 1800 s, unlearned)"),
        (
            sections(rows=(row("step", open_since=at(50)),)),
            "in section 'step' for 3950.0 s (timeout 1800 s, unlearned)",
        ),
        (
            sections(rows=(row("step", closed_at=at(50)),)),
            "outside any section for 3950.0 s (timeout 1800 s, unlearned)",
        ),
        (sections(done_since=at(1000)), "not ended after its loop was done for 3000.0 s (timeout 1800 s, unlearned)"),
    ],
)
def test_verdict_says_what_is_silent_for_how_long_and_who_set_the_timeout(seen: PageView, sentence: str) -> None:
    assert judge(seen, Timeouts(), 4000, ADOPTED).message(at(4000)) == sentence


# -- a reader may look between any two stores -------------------------------------------------------------------------


class Watched:
    """A page's words that call ``look`` after every store."""

    def __init__(self, words: Any, look: Callable[[], None]) -> None:
        self._words, self._look = words, look

    def __getitem__(self, index: Any) -> Any:
        found = self._words[index]
        return Watched(found, self._look) if isinstance(index, slice) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        self._words[index] = value
        self._look()


class WatchedPage:
    """A page whose writer can be caught between any two stores."""

    def __init__(self, page: Page, look: Callable[[], None]) -> None:
        self.words, self.floats = Watched(page.words, look), Watched(page.floats, look)
        self.set_name, self.name_of = page.set_name, page.name_of


def beat_often(pulse: Pulse, clock: FakeClock) -> None:
    for step in range(30):
        pulse.beat(step)
        clock.wait(1)


def evaluate_long(pulse: Pulse, clock: FakeClock) -> None:
    with_section = pulse.borrow("evaluate")
    for _ in range(2):
        with_section.enter()
        clock.wait(600)
        with_section.leave()
        pulse.beat(None)
        clock.wait(0.001)


def expect_after_a_pause(pulse: Pulse, clock: FakeClock) -> None:
    pulse.unexpect()
    clock.wait(1000)
    pulse.expect(5.0)
    clock.wait(4)
    pulse.beat(1)


def expect_shorter_while_beating(pulse: Pulse, clock: FakeClock) -> None:
    clock.wait(20)
    pulse.expect(5.0)
    pulse.beat(1)


def finish_with_everything_open(pulse: Pulse, clock: FakeClock) -> None:
    pulse.borrow("step").enter()
    clock.wait(29)
    pulse.close_all()
    pulse.unexpect()
    clock.wait(1000)
    pulse.finish()


@pytest.mark.parametrize(
    "script", [evaluate_long, expect_after_a_pause, expect_shorter_while_beating, finish_with_everything_open]
)
def test_monitor_that_looks_between_any_two_stores_sees_no_hang(
    script: Callable[[Pulse, FakeClock], None],
) -> None:
    page, clock = Page.create(0), FakeClock()
    looks: list[Verdict] = []

    def look() -> None:
        looks.append(verdict(page.read(), learned(heartbeat=1.0), clock.now, ADOPTED))

    with writer_time(clock):
        pulse = Pulse(WatchedPage(page, look))  # type: ignore[arg-type]
        beat_often(pulse, clock)
        script(pulse, clock)
    wrong = [judged for judged in looks if judged.kind != FINE]
    assert len(looks) > 30
    assert wrong == []
    os.close(page.fd)


# -- what a life teaches ----------------------------------------------------------------------------------------------


def test_life_teaches_its_first_sign_its_gaps_and_its_sections() -> None:
    seen = beating(
        100,
        first_sign=at(12),
        gaps=Seen(50, 2 * S, 9 * S),
        pauses=Seen(3, S, 4 * S),
        rows=(row("step", seen=Seen(5, 3 * S, S)), row("step", seen=Seen(2, 7 * S, 0)), row("new", seen=Seen())),
    )
    assert learned_from(seen, START) == {
        "initial": Samples(1, 12.0, 0.0),
        "heartbeat": Samples(50, 2.0, 9.0),
        "out-of-section": Samples(3, 1.0, 4.0),
        "section:step": Samples(5, 7.0, 1.0),
    }


def test_life_that_said_nothing_teaches_nothing() -> None:
    assert learned_from(view(), START) == {}


def test_verdict_changes_nothing() -> None:
    seen, timeouts = beating(1, rows=(row("step", open_since=at(2)),)), learned(heartbeat=1.0)
    copies = dataclasses.replace(seen), dataclasses.replace(timeouts)
    judge(seen, timeouts, 1e6)
    assert (seen, timeouts) == copies
