"""Two nodes whose clocks differ: of two failures within a second the first is still the cause.

Failures are compared by CLOCK_MONOTONIC, corrected between nodes; wall clocks are only shown to people.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, Fleet

pytestmark = [pytest.mark.spawns, pytest.mark.root]


def skewed(seconds: int) -> list[str]:
    """A time namespace: CLOCK_MONOTONIC is another one in there."""
    return ["unshare", "--time", "--fork", "--kill-child", f"--monotonic={seconds}", "--"]


@pytest.mark.parametrize(("node", "seconds"), [(1, 7200), (0, -600)])
def test_first_of_two_failures_is_the_cause_whatever_the_clocks_say(tmp_path: Path, node: int, seconds: int) -> None:
    # Rank 1 fails 50 ms before rank 0, or more. Uncorrected, both skews would make rank 0 the first.
    with Fleet(tmp_path, "2", ["--max-restarts=1"], [str(WORKLOADS / "collective.py"), "both"]) as it:
        for number in range(2):
            if number == node:
                it.add(
                    env={"JOB_COMPLETION_INDEX": str(number)},
                    wrap=lambda words: [*skewed(seconds), *words],
                )
            else:
                it.add(env={"JOB_COMPLETION_INDEX": str(number)})
        reports = [launcher.report(0) for launcher in it.nodes]
        assert reports[0] == reports[1]
        assert reports[0]["culprit"]["rank"] == 1, it.logs()
        assert reports[0]["culprit"]["message"] == "RuntimeError: rank 1 is sure of itself"
        gaps = {item["rank"]: item["after_s"] for item in reports[0]["failures"]}
        assert len(gaps) == 1 or 0 < gaps[0] < 60, gaps
        assert [launcher.wait() for launcher in it.nodes] == [0, 0], it.logs()
