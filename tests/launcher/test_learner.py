from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from resilience.config import Settings, TimeoutConfig, resolve
from resilience.launcher.learner import Learner, given_timeouts
from resilience.monitor.process import read_timeouts
from resilience.pulse.timeouts import Limit, Samples


def test_nothing_given_and_nothing_seen_is_thirty_minutes() -> None:
    limit = Learner(Settings()).timeouts().limit("heartbeat")
    assert (limit.seconds, limit.source) == (1800.0, "unlearned")


def test_seeing_something_new_is_a_change_and_seeing_it_again_is_not() -> None:
    learner = Learner(Settings())
    assert learner.see((0, 0), {"heartbeat": Samples(20, 1.0)})
    assert not learner.see((0, 0), {"heartbeat": Samples(20, 1.0)})
    assert not learner.see((0, 1), {"heartbeat": Samples(3, 0.5)})
    assert learner.see((0, 1), {"heartbeat": Samples(3, 2.0)})


def test_what_was_learned_outlives_the_ranks() -> None:
    learner = Learner(Settings())
    learner.see((0, 0), {"section:step": Samples(100, 20.0, 60.0)})
    learner.see((1, 0), {"section:step": Samples(1, 0.1, 0.1)})
    assert learner.timeouts().limit("section:step").seconds == 100.0
    assert learner.timeouts().limit("section:step", early=True).seconds == 300.0


def test_first_signs_of_life_are_counted_by_lives_and_not_by_messages() -> None:
    learner = Learner(Settings())
    for _ in range(50):
        learner.see((0, 0), {"initial": Samples(1, 20.0)})
    assert learner.timeouts().limit("initial").source == "unlearned"
    for rank in range(16):
        learner.see((1, rank), {"initial": Samples(1, 10.0)})
    assert learner.timeouts().limit("initial").seconds == 100.0


def test_alarm_doubles_a_learned_timeout_and_leaves_a_given_one() -> None:
    learner = Learner(resolve({"rank_out_of_section_timeout": "7"}, {}))
    learner.see((0, 0), {"heartbeat": Samples(100, 1.0)})
    learner.alarm("heartbeat", Limit(30.0, "learned"))
    learner.alarm("heartbeat", Limit(30.0, "learned"))  # the next rank tells the same
    learner.alarm("out-of-section", Limit(7.0, "flag"))
    assert learner.timeouts().limit("heartbeat").seconds == 60.0
    assert learner.timeouts().limit("out-of-section").seconds == 7.0


def test_calculated_timeouts_take_the_place_of_given_ones() -> None:
    learner = Learner(resolve({"rank_heartbeat_timeout": "7"}, {}))
    learner.calculate({"heartbeat": 90.0})
    limit = learner.timeouts().limit("heartbeat")
    assert (limit.seconds, limit.source) == (90.0, "calculated")


def test_given_timeouts_know_where_they_came_from(tmp_path: Path) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance:\n  rank_section_timeouts: {step: 9, save: null}\n  rank_exit_timeout: null\n")
    settings = resolve({"rank_heartbeat_timeout": "5"}, {"RESILIENCE_INITIAL_RANK_HEARTBEAT_TIMEOUT": "60"}, str(path))
    assert given_timeouts(settings) == {
        "heartbeat": (5.0, "flag"),
        "initial": (60.0, "environment"),
        "exit": (math.inf, f"file {path}"),
        "section:step": (9.0, f"file {path}"),
        "section:save": (math.inf, f"file {path}"),
    }


def test_learned_is_not_given() -> None:
    assert given_timeouts(resolve({"rank_heartbeat_timeout": "learned"}, {})) == {}


def test_monitor_reads_what_the_learner_writes() -> None:
    config = TimeoutConfig(
        rank_heartbeat_timeout=math.inf,
        rank_section_timeouts={"step": 3.0},
        safety_factor=2.0,
        learned_timeout_floor=1.0,
        unlearned_timeout=math.inf,
        learn_after=4,
    )
    learner = Learner(Settings(config, sources={"rank_section_timeouts": "flag"}))
    learner.see((0, 0), {"section:load": Samples(4, 20.0, 1.0)})
    text = json.dumps(learner.message(), allow_nan=False)
    assert read_timeouts(json.loads(text)) == learner.timeouts()


def test_client_reads_limits_and_what_could_be_calculated() -> None:
    learner = Learner(resolve({"rank_heartbeat_timeout": "null"}, {}))
    learner.merge({"section:step": Samples(2, 10.0)})
    answer = json.loads(json.dumps(learner.answer(), allow_nan=False))
    assert answer["limits"]["heartbeat"] is None
    assert answer["limits"]["section:step"] == 1800.0
    assert answer["calculated"] == {"section:step": 50.0}
    assert answer["learned"] == {"section:step": [2, 10.0, 0.0]}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_nodes_come_to_the_same_timeouts_in_any_order(order: tuple[int, int]) -> None:
    tables = [{"heartbeat": Samples(40, 1.0)}, {"heartbeat": Samples(2, 30.0), "section:step": Samples(16, 50.0)}]
    learner = Learner(Settings())
    for index in order:
        learner.merge(tables[index])
    assert learner.timeouts().limit("heartbeat").seconds == 150.0
    assert learner.timeouts().limit("section:step").seconds == 250.0
