from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from resilience.config import Settings
from resilience.errors import RankMonitorClientError
from resilience.launcher.learner import Learner
from resilience.pulse import attach
from resilience.pulse.rank_monitor_client import HeartbeatTimeouts, RankMonitorClient, SectionTimeouts
from resilience.pulse.timeouts import Samples, from_json
from resilience.pulse.writer import Pulse
from tests.fakes import FakeClock


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch, pulse: Pulse) -> Iterator[Learner]:
    """Be a rank whose launcher answers, without the socket: every message makes the way through JSON."""
    mind = Learner(Settings())

    def ask(message: dict[str, Any], timeout: float = 5.0) -> dict[str, Any] | None:
        message = json.loads(json.dumps(message))
        if message["op"] == "load":
            mind.merge(from_json(message["learned"]))
        elif message["op"] == "calculated":
            mind.calculate(message["limits"])
        answer: dict[str, Any] = json.loads(json.dumps(mind.answer()))
        return answer

    monkeypatch.setattr(attach, "ask", ask)
    yield mind


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("send_heartbeat", ()),
    ("start_section", ("step",)),
    ("end_section", ("step",)),
    ("end_all_sections", ()),
    ("calculate_and_set_hb_timeouts", ()),
    ("calculate_and_set_section_timeouts", ()),
    ("shutdown_workload_monitoring", ()),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_call_before_init_raises(pulse: Pulse, name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RankMonitorClientError, match=r"call init_workload_monitoring\(\) first"):
        getattr(RankMonitorClient(), name)(*arguments)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_call_after_shutdown_raises(pulse: Pulse, name: str, arguments: tuple[Any, ...]) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.shutdown_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match=r"call init_workload_monitoring\(\) first"):
        getattr(client, name)(*arguments)


def test_second_init_raises(pulse: Pulse) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="called twice"):
        client.init_workload_monitoring()


def test_ending_a_section_that_is_not_open_raises(pulse: Pulse) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.start_section("step")
    with pytest.raises(RankMonitorClientError, match=r"'setup'.*not open in this thread"):
        client.end_section("setup")
    client.end_section("step")
    with pytest.raises(RankMonitorClientError, match=r"'step'.*not open"):
        client.end_section("step")


def test_calls_are_the_in_loop_calls_under_other_names(pulse: Pulse) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_heartbeat()
    client.start_section("epoch")
    client.start_section("step")
    assert [row.name for row in pulse.page.read().open_rows()] == ["epoch", "step"]
    client.end_all_sections()
    assert pulse.page.read().open_rows() == []
    client.start_section("step")
    client.shutdown_workload_monitoring()
    view = pulse.page.read()
    assert (view.beats, view.open_rows(), view.expected_since) == (1, [], 0)
    assert view.done_since


def test_heartbeats_are_expected_again_after_another_init(pulse: Pulse, clock: FakeClock) -> None:
    client = RankMonitorClient()
    for _ in range(2):
        client.init_workload_monitoring()
        clock.wait(5)
        client.send_heartbeat()
        assert pulse.page.read().done_since == 0
        assert pulse.page.read().expected_since
        clock.wait(5)
        client.shutdown_workload_monitoring()


@pytest.mark.usefixtures("alone")
def test_without_a_launcher_every_call_does_nothing() -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_heartbeat()
    client.start_section("step")
    client.end_section("step")
    client.end_all_sections()
    assert client.hb_timeouts == HeartbeatTimeouts()
    assert client.section_timeouts == SectionTimeouts()
    assert client.calculate_and_set_hb_timeouts(skip_if_not_ready=True) is False
    assert client.state_dict() == {"version": 1, "calculated": {}, "learned": {}}
    client.shutdown_workload_monitoring()


@pytest.mark.usefixtures("alone")
def test_without_a_launcher_calculating_timeouts_does_not_end_the_script() -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    assert client.calculate_and_set_hb_timeouts() is False
    assert client.calculate_and_set_section_timeouts(["step"]) is False


def test_calculating_from_nothing_raises_or_is_skipped_as_asked(learner: Learner) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match=r"not enough was seen.*heartbeat.*left as they are"):
        client.calculate_and_set_hb_timeouts()
    with pytest.raises(RankMonitorClientError, match="section:step"):
        client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    assert client.calculate_and_set_hb_timeouts(skip_if_not_ready=True) is False
    assert client.hb_timeouts == HeartbeatTimeouts(1800.0, 1800.0, False)


def test_calculated_timeouts_have_the_floor_and_are_in_force(learner: Learner) -> None:
    learner.merge({"initial": Samples(1, 100.0), "heartbeat": Samples(3, 0.002), "section:step": Samples(3, 20.0)})
    client = RankMonitorClient()
    client.init_workload_monitoring()
    assert client.calculate_and_set_hb_timeouts() is True
    assert client.hb_timeouts == HeartbeatTimeouts(500.0, 30.0, True)
    assert client.calculate_and_set_section_timeouts(calc_out_of_section=False) is True
    assert client.section_timeouts == SectionTimeouts({"step": 100.0}, 1800.0, frozenset({"step"}), False)
    assert learner.timeouts().limit("section:step").source == "calculated"


def test_second_calculation_goes_half_way(learner: Learner) -> None:
    learner.merge({"heartbeat": Samples(3, 10.0)})
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.calculate_and_set_hb_timeouts()
    learner.merge({"heartbeat": Samples(3, 30.0)})
    client.calculate_and_set_hb_timeouts()
    assert client.hb_timeouts.subsequent == 100.0


def test_no_timeout_is_shown_as_infinite(learner: Learner) -> None:
    learner._given["heartbeat"] = (math.inf, "flag")
    assert RankMonitorClient().hb_timeouts.subsequent == math.inf


def test_state_goes_around_through_json_and_is_taken_up_by_another_run(learner: Learner) -> None:
    learner.merge({"heartbeat": Samples(40, 10.0, 3.0), "section:step": Samples(40, 20.0, 5.0)})
    first = RankMonitorClient()
    first.init_workload_monitoring()
    first.calculate_and_set_hb_timeouts()
    state = json.loads(json.dumps(first.state_dict()))
    learner.learned, learner._calculated = {}, {}  # another run: nothing is known

    second = RankMonitorClient()
    second.load_state_dict(state)
    second.init_workload_monitoring()
    assert second.hb_timeouts.subsequent == 50.0
    assert second.hb_timeouts.were_calculated
    assert learner.learned["section:step"] == Samples(40, 20.0, 5.0)
    assert second.state_dict() == state


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"hb_timeouts": 1}])
def test_state_of_another_version_is_refused(pulse: Pulse, state: dict[str, Any]) -> None:
    with pytest.raises(RankMonitorClientError, match="not a state of this version"):
        RankMonitorClient().load_state_dict(state)
