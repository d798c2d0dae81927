"""Two hosts with a real link between them: it is cut, for a while or for good."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, Job, job, wait_for
from tests.real.hosts import Host, can_make_hosts, hosts

pytestmark = [pytest.mark.spawns, pytest.mark.root]
SCRIPT = str(WORKLOADS / "two_nodes.py")
RDZV = "join_timeout=20,read_timeout=10,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def test_this_machine_can_make_hosts() -> None:
    assert can_make_hosts(), "run this as root with iproute2 installed: make test-real"


@contextmanager
def two_hosts(
    folder: Path, options: list[str], script: list[str], env: dict[str, str]
) -> Iterator[tuple[list[Host], list[Job]]]:
    with hosts(2) as made, ExitStack() as stack:
        jobs = []
        for host in made:
            common = [
                "--nnodes=2",
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={made[0].address}:29400",
                "--rdzv-id=job",
                f"--local-addr={host.address}",
                *options,
            ]
            common.append(f"--rdzv-conf={RDZV},is_host={'true' if host is made[0] else 'false'}")
            place = {"GLOO_SOCKET_IFNAME": "eth0", **env}
            jobs.append(stack.enter_context(job(folder / host.name, common, script, place, host.command)))
        yield made, jobs


def await_step(jobs: list[Job], step: int, cycle: int = 0) -> None:
    for rank in range(2):
        wait_for(
            lambda rank=rank: any(note[:2] == [str(cycle), f"step-{step}"] for it in jobs for note in it.notes(rank)),  # type: ignore[misc]
            f"rank {rank} to reach step {step}\n{jobs[0].log()}\n{jobs[1].log()}",
        )


def test_a_hang_on_one_host_is_explained_on_both_and_both_restart(tmp_path: Path) -> None:
    options = ["--max-restarts=1", "--ft-rank-section-timeouts=load:2"]
    with two_hosts(tmp_path, options, [SCRIPT, "30", "hang", "10"], {}) as (_, jobs):
        assert [it.wait() for it in jobs] == [0, 0], jobs[0].log() + jobs[1].log()
        reports = [it.report(0) for it in jobs]
        assert reports[0] == reports[1]
        assert (reports[0]["culprit"]["rank"], reports[0]["culprit"]["kind"]) == (1, "hang")
        assert reports[0]["culprit"]["host"] == "host-b"
        assert all("two_nodes.py" in item["stack"] for item in reports[0]["ranks"])


def test_a_link_that_is_down_for_four_seconds_costs_no_restart(tmp_path: Path) -> None:
    with two_hosts(tmp_path, ["--max-restarts=1"], [SCRIPT, "200", "none", "0"], {"DT": "0.05"}) as (made, jobs):
        await_step(jobs, 20)
        made[1].cut()
        time.sleep(4)  # the length of the outage is what is tested
        made[1].heal()
        assert [it.wait() for it in jobs] == [0, 0], jobs[0].log() + jobs[1].log()
        assert not any((it.run_dir / "cycles").exists() for it in jobs)


def test_a_link_that_stays_down_ends_in_a_verdict_on_both_sides(tmp_path: Path) -> None:
    options = ["--max-restarts=1", "--ft-store-silence-timeout=8", "--ft-node-silence-timeout=8"]
    with two_hosts(tmp_path, options, [SCRIPT, "100000", "none", "0"], {}) as (made, jobs):
        await_step(jobs, 20)
        made[1].cut()
        assert jobs[1].wait(120) == 75, jobs[1].log()
        assert "cut off" in jobs[1].report(0)["culprit"]["message"]
        jobs[1].assert_nothing_left()
        assert jobs[0].wait(120) == 75, jobs[0].log()  # too few nodes came together again
        report = jobs[0].report(0)
        assert (report["culprit"]["kind"], report["culprit"]["host"]) == ("node", "host-b")
        jobs[0].assert_nothing_left()
