"""A job's processes on a real Ray cluster: one that hangs, raises or can't be set up is noticed, and the job goes on or says so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests import jobs
from tests.jobs import wait_for
from tests.real.ray_training import PATIENCE_S, SCRIPT, Site

pytestmark = pytest.mark.timeout(900)


class Raises:
    """An actor whose answer is an error."""

    def report(self, *_: Any) -> None:
        raise OSError(36, "File name too long")


def raising(ray: Any) -> Any:
    return ray.remote(Raises).options(num_cpus=0).remote()


def without_its_package(ray: Any) -> Any:
    lacking = {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}
    return ray.remote(Raises).options(num_cpus=0, runtime_env=lacking).remote()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (raising, "it can't answer: OSError(36, 'File name too long')"),
        (without_its_package, "RuntimeEnvSetupError: Failed to "),
    ],
)
def test_actor_that_gives_an_error_for_an_answer_is_gone_and_the_supervisor_does_not_stumble(
    site: Site, make: Callable[[Any], Any], said: str
) -> None:
    import ray
    from resilience.integrations.ray import JobBuilder, memory
    from resilience.integrations.ray.cluster import Hands

    site.cluster.some(1)
    hands = Hands(JobBuilder().train("train.py").build().spec, memory.Submission("", "ab"))
    actor = make(ray)
    hands._calls = {actor.report.remote(): 7}

    def heard() -> str:
        hands.wait(1.0)
        return str(hands._gone.get(7, ""))

    assert said in wait_for(heard, "the error to be heard", 120)
    ray.kill(actor)


def test_answers_that_come_at_once_are_all_heard_at_once_and_nobody_who_answered_is_held_for_hung(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from resilience.integrations.ray import JobBuilder, memory
    from resilience.integrations.ray.cluster import Hands

    class Answers:
        def report(self, *_: Any) -> dict[str, Any]:
            return {"life": "one", "version": 1, "launch": 0, "code": None, "why": "", "grace_s": None}

    site.cluster.some(1)
    hands = Hands(JobBuilder().train("train.py").build().spec, memory.Submission("", "ab"))
    actor = ray.remote(Answers).options(num_cpus=0).remote()
    calls = [actor.report.remote() for _ in range(50)]
    hands._actors = dict.fromkeys(range(1, 51), actor)
    hands._calls = {call: number for number, call in enumerate(calls, 1)}
    ray.wait(calls, num_returns=50, timeout=60)
    monkeypatch.setattr(hands._patience, "is_over", lambda *_: "it hangs")
    hands._give_up_the_silent()
    assert not hands._gone
    hands.wait(1.0)
    assert (len(hands._reports), hands._calls) == (50, {})
    ray.kill(actor)


def test_actor_whose_placement_group_somebody_has_removed_is_gone(site: Site) -> None:
    from resilience.integrations.ray import JobBuilder, memory
    from resilience.integrations.ray.cluster import Hands
    from resilience.integrations.ray.state import Phase, Slot, State

    hands = Hands(JobBuilder().name("bare").train("train.py").build().spec, memory.Submission("", "ab"))
    seen = hands.look(State(Phase.RUNNING, slots=(Slot(0, claim=1), Slot(1, claim=2, node="placed"))))
    assert [seen.claims[claim].gone for claim in (1, 2)] == ["", "somebody has removed its placement group"]


@pytest.mark.parametrize("when", ["wait", pytest.param("look", marks=pytest.mark.rare)])
def test_supervisor_that_stumbles_again_and_again_says_so_and_a_job_that_never_began_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    import ray
    from resilience.integrations.ray import JobBuilder, memory, supervisor

    name = f"deaf-{when}"

    def hear(*_: Any) -> None:
        raise ValueError("what it hears makes no sense")

    monkeypatch.setattr(supervisor.Hands, when, hear)
    monkeypatch.setattr(supervisor, "_AFTER_A_MISTAKE_S", 0.05)
    spec = JobBuilder().name(name).train(SCRIPT, site.folder, 5).resources_per_node(nowhere=1).build().spec
    its_name = ray.remote(Raises).options(name=name, namespace=memory.NAMESPACE, num_cpus=0).remote()
    assert supervisor.Supervisor(name, "ab", "", spec.as_text()).ready() == ""

    def state() -> Any:
        return memory.load(name)

    wait_for(lambda: "makes no sense; it tries again" in state().reason, "the status to say it")
    wait_for(lambda: state().phase.over, "the job to be given up", 120)
    assert "nothing was started: the supervisor stumbled 60 times in a row" in state().reason
    wait_for(lambda: ray._private.state.actors(its_name._actor_id.hex())["State"] == "DEAD", "the supervisor's end")


def test_ranks_share_the_cpus_that_ray_gives_their_actor_unless_people_say_otherwise(site: Site) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from resilience.integrations.ray.node import NodeAgent

    here = {
        "num_cpus": 3,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(site.own_node("cpus", cpus=3), soft=False),
    }
    script = site.folder / "threads.py"
    script.write_text(
        "import os, sys\nopen(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['OMP_NUM_THREADS'])\n"
    )

    def threads(ranks: int, **by_people: str) -> list[str]:
        env = {"runtime_env": {"env_vars": by_people}} if by_people else {}
        actor = ray.remote(NodeAgent).options(max_concurrency=8, **here, **env).remote()
        flags = [f"--nproc-per-node={ranks}", "--standalone", f"--ft-run-dir={site.folder}/run"]
        try:
            actor.order.remote(1, [*flags, str(script), str(site.folder / "told-")], {}, None, False)
            said = wait_for(lambda: _ended(ray.get(actor.report.remote(), timeout=60)), "its end", PATIENCE_S)
            assert said["code"] == 0, said
        finally:
            ray.kill(actor)
        return [(site.folder / f"told-{rank}").read_text() for rank in range(ranks)]

    assert threads(2) == ["1", "1"]
    assert threads(1) == ["3"]
    assert threads(2, OMP_NUM_THREADS="3") == ["3", "3"]


def _ended(said: dict[str, Any]) -> dict[str, Any] | None:
    return said if said["code"] is not None else None


def test_process_that_is_connected_to_no_cluster_asks_whether_it_was_given_up_and_starts_none() -> None:
    code = (
        "import ray; from resilience.integrations.ray import fence\n"
        "assert not fence.given_up() and not ray.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


SLOW_TO_LEAVE = """
import sys, time, resilience
from pathlib import Path
for step in range(100_000):
    resilience.heartbeat(step)
    Path(sys.argv[1], "begun").touch()
    if resilience.stop_requested():
        for _ in range(50):
            resilience.heartbeat()
            time.sleep(1)
        Path(sys.argv[1], "saved").touch()
        break
    time.sleep(0.05)
"""


@pytest.mark.rare
def test_ranks_have_the_time_to_leave_that_only_their_nodes_environment_promises(site: Site) -> None:
    from resilience.integrations.ray import JobBuilder

    site.own_node("patient", RESILIENCE_STOP_GRACE="150")
    script = site.folder / "slow.py"
    script.write_text(SLOW_TO_LEAVE)
    builder = JobBuilder().name("patient").train(str(script), site.folder).node_labels({"pen": "patient"})
    job = builder.run_dir(site.folder / "run").build().submit()
    wait_for((site.folder / "begun").exists, "it to train", PATIENCE_S)
    status = job.stop(PATIENCE_S)
    assert (site.folder / "saved").exists(), str(status)
    assert (status.phase, status.reason) == ("STOPPED", "a stop was asked for")


@pytest.mark.rare
def test_supervisor_that_hangs_is_replaced_by_whoever_waits_and_the_stop_is_an_agreed_one(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resilience.integrations.ray import silence, status

    monkeypatch.setattr(silence, "_PATIENCE_S", 15.0)
    monkeypatch.setattr(status, "SHOWN_S", 10.0)
    it = site.training(1, room=2)
    stopped = int(it.actor("Supervisor")["Pid"])
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_for(lambda: it.job.status().silent_s, "the status to tell of its silence", 120)
        assert "its supervisor gave its last sign of life " in str(it.job.status())
        end = it.job.stop(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    assert (end.phase, end.exit_code, end.reason) == ("STOPPED", 79, "a stop was asked for")
    assert "its supervisor has given no sign of life for 15 s" in caplog.text
    assert not jobs.alive(stopped)
    it.assert_nothing_left()


def test_job_whose_run_folder_can_not_be_made_fails_with_2_and_says_so(site: Site) -> None:
    from resilience.integrations.ray import JobBuilder

    site.cluster.some(1)
    job = JobBuilder().name("too-long").train(SCRIPT, site.folder, 5).run_dir(site.folder / ("a" * 300)).build()
    status = job.submit().wait(PATIENCE_S)
    assert (status.phase, status.exit_code) == ("FAILED", 2), str(status)
    assert "ended with 2: the run's directory /" in status.reason
