"""How long a step is waited for whose end is due. No Slurm and no clock is needed: time is passed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm.deadlines import Deadlines
from resilience.integrations.slurm.start import Options
from resilience.integrations.slurm.values import MARGIN_S

from resilience.failover.ends import NodeEnd


def made(nodes: int = 2, needed: int = 2, **more: Any) -> Deadlines:
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    arguments = (f"--nnodes={needed}", "--ft-stop-grace=60", "train.py")
    return Deadlines(Options("7", 0, Path("runs"), nodes, needed, "h", arguments, names=names, **more))


def test_launchers_that_were_asked_to_stop_and_say_nothing_are_ended_before_slurm_does_it() -> None:
    """A launcher that SIGUSR1 has killed while Python started, with another that waits for it; or an srun that is stopped."""
    deadlines = made()
    assert deadlines.overdue((), True, 1000.0) == ""
    assert deadlines.overdue((), True, 1060.0) == "", "they have their grace"
    assert "asked to stop 85 s ago, and none says that it has" in deadlines.overdue((), True, 1085.0)
    assert 60 + MARGIN_S > 85, "and the job is requeued before its time is up"


def test_node_that_left_before_the_request_has_not_stopped() -> None:
    deadlines = made(nodes=3)
    left = (NodeEnd("n1", 201),)
    deadlines.overdue(left, False, 0.0)
    deadlines.overdue(left, True, 1000.0)
    assert "asked to stop 85 s ago" in deadlines.overdue(left, True, 1085.0)
    assert deadlines.overdue((*left, NodeEnd("n2", 79)), True, 1085.0) == "", "the others are on their way"


def test_job_that_nobody_asked_to_stop_may_say_nothing_for_as_long_as_it_likes() -> None:
    deadlines = made()
    assert deadlines.overdue((), False, 0.0) == ""
    assert deadlines.overdue((), False, 1e9) == ""
    assert deadlines.overdue((), True, 1e9) == "", "it counts from the request on"


def test_spare_that_hangs_at_a_stop_is_not_waited_for() -> None:
    deadlines = made(nodes=4)
    found = (NodeEnd("n1", 79),)
    assert deadlines.overdue(found, True, 0.0) == ""
    assert deadlines.overdue(found, True, 89.0) == ""
    assert deadlines.overdue(found, True, 91.0) == "what follows is settled, and n2, n3, n4 does not say how it ended"


def test_hung_launcher_is_waited_for_from_the_request_on_and_not_from_the_first_word() -> None:
    deadlines = made(nodes=2)
    assert deadlines.overdue((), True, 0.0) == ""
    found = (NodeEnd("n1", 79),)
    assert deadlines.overdue(found, True, 70.0) == ""
    assert deadlines.overdue(found, True, 89.0) == ""
    assert deadlines.overdue(found, True, 91.0) == "what follows is settled, and n2 does not say how it ended"


def test_request_to_stop_gives_no_more_time_to_a_job_that_was_settled_before() -> None:
    deadlines = made(nodes=2)
    found = (NodeEnd("n1", 1),)
    assert deadlines.overdue(found, False, 0.0) == ""
    assert deadlines.overdue(found, True, 50.0) == ""
    assert deadlines.overdue(found, True, 91.0)


def test_spare_that_ends_with_1_at_once_does_not_speak_for_those_that_are_silent() -> None:
    deadlines = made(nodes=3)
    found = (NodeEnd("n3", 1),)
    assert deadlines.overdue(found, True, 1000.0) == ""
    assert deadlines.overdue(found, True, 1079.0) == "", "they have their grace"
    assert "asked to stop 81 s ago, and none says that it has" in deadlines.overdue(found, True, 1081.0)


def test_srun_that_does_not_end_after_all_launchers_have_is_named() -> None:
    deadlines = made()
    found = (NodeEnd("n1", 1), NodeEnd("n2", 1))
    deadlines.overdue(found, False, 0.0)
    assert deadlines.overdue(found, False, 91.0) == "what follows is settled, and srun does not end"


def test_job_that_finishes_after_all_is_not_hurried_by_a_node_that_left_before() -> None:
    deadlines = made(nodes=4, needed=4)
    left, finished = NodeEnd("n1", 201), NodeEnd("n2", 0)
    deadlines.overdue((left,), False, 0.0)
    assert deadlines.overdue((left,), False, 91.0)
    assert not deadlines.overdue((left, finished), False, 92.0), "the others may be writing their last checkpoint"


@pytest.mark.parametrize(
    ("arguments", "grace", "most"),
    [
        ("--nnodes=2 --ft-stop-grace=600 t.py", 600, 2),
        ("--nnodes 2 --ft-stop-grace 600 t.py", 600, 2),
        ("--nnodes 1:2 --ft_stop_grace 600 -m t", 600, 2),
        ("--ft-param-stop-grace=600 --network-check t.py --nnodes=1", 600, 4),
        ("--ft-stop-grace=1 --ft-stop-grace=600 t.py --ft-stop-grace=7", 600, 4),
        ("--max-restarts 3 --nnodes=2 --no-python -- ./t --nnodes=1", 25, 2),
        ("t.py --nnodes=1", 25, 4),
    ],
)
def test_flags_are_read_as_the_launcher_reads_them(arguments: str, grace: float, most: int) -> None:
    options = Options("7", 0, Path("runs"), 4, 2, "h", tuple(arguments.split()))
    assert (options.grace, options.most) == (grace, most)
