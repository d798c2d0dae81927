"""The real OOM killer, in a real control group: its victim is told apart from a process that somebody killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs import WORKLOADS, job, wait_for

pytestmark = [pytest.mark.spawns, pytest.mark.root]
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@contextmanager
def limited(limit: int) -> Iterator[Path]:
    """A memory control group, version 1 or 2, and its end."""
    v1 = (_V1 / "cgroup.procs").exists()
    group = (_V1 if v1 else _V2) / f"resilience-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit))
        yield group
    finally:
        deadline = time.monotonic() + 20
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def test_node_check_sees_the_limit_of_a_group_above_its_own(tmp_path: Path) -> None:
    """As Slurm and systemd set them: on the job, or the service, and not on the hierarchy's root."""
    look = f"from resilience.nodecheck import host; it = host.look({str(tmp_path)!r}); print(it.figures['memory_mib'], it.faults)"
    with limited(200 << 20) as group:
        step = group / "step"
        step.mkdir()
        try:
            command = ["sh", "-c", f'echo $$ > {step}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", look]
            said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        finally:
            step.rmdir()
    assert said.startswith("200.0 "), said
    assert "MiB of memory are left, 256 MiB are the least" in said


def test_victim_of_the_oom_killer_is_said_to_have_run_out_of_memory(tmp_path: Path) -> None:
    with limited(1 << 30) as group:

        def inside(words: list[str]) -> list[str]:
            return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]

        options = ["--nproc-per-node=2", "--max-restarts=3"]
        with job(tmp_path, options, [str(WORKLOADS / "fleet.py"), "100000"], wrap=inside) as it:
            it.await_note(1, "step-3")
            it.order("eat", 1)
            report = it.report(0)
            assert (report["culprit"]["rank"], report["culprit"]["kind"]) == (1, "oom"), it.log()
            assert "OOM killer" in report["culprit"]["message"]
            assert "1.00 GiB" in report["culprit"]["message"]
            assert "it ran out of memory" in report["action_detail"]
            it.await_note(1, "step-0", cycle=1)
            it.order("kill SIGKILL", 1)
            assert it.report(1)["culprit"]["kind"] == "signal", "this one was no OOM kill"
            wait_for(lambda: it.steps(2), "the third cycle")
            (it.progress / "finish").touch()
            assert it.wait() == 0, it.log()


def test_out_of_memory_twice_without_progress_ends_the_job_with_its_cause(tmp_path: Path) -> None:
    with limited(1 << 30) as group:

        def inside(words: list[str]) -> list[str]:
            return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]

        options = ["--nproc-per-node=1", "--max-restarts=9"]
        with job(tmp_path, options, [str(WORKLOADS / "fleet.py"), "100000"], wrap=inside) as it:
            it.await_note(0, "step-60")
            it.order("eat", 0)
            it.await_note(0, "step-3", cycle=1)
            it.order("eat", 0)
            assert it.wait() == 77, it.log()
            assert it.report(1)["culprit"]["kind"] == "oom"
            assert "the same failure as in cycle 0" in it.log()
