"""The lives of a supervisor and of its actors on a real Ray cluster: which one acts, and what those do that nobody looks after."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests import jobs
from tests.jobs import wait_for
from tests.real.ray_cluster import ENVIRONMENT
from tests.real.ray_training import SCRIPT, Site, Training, kill, losses, starts

pytestmark = pytest.mark.timeout(900)


def another_life(it: Training, first: dict[str, Any], seconds: float = 60.0) -> None:
    wait_for(lambda: it.actor("Supervisor").get("Pid", first["Pid"]) != first["Pid"], "another supervisor", seconds)


def test_supervisor_that_finds_a_newer_life_ends_and_touches_nothing_and_one_that_was_killed_forgets_its_stumbles(
    site: Site,
) -> None:
    from resilience.integrations.ray import memory
    from resilience.integrations.ray.state import STUMBLES

    it = site.training(1, room=2)
    name, begun, agent = it.job.name, starts(it.folder), it.actor("NodeAgent")["Pid"]
    first = it.actor("Supervisor")
    memory.begin_life(name, "0ther/life")
    wait_for(lambda: not jobs.alive(int(first["Pid"])), "the one that is not the newest to end itself")
    another_life(it, first)  # Ray still wants it, so there is one more life, which is the newest again
    second = it.actor("Supervisor")
    it.await_steps(20)
    assert it.actor("Supervisor")["Pid"] == second["Pid"]
    assert (starts(it.folder), it.actor("NodeAgent")["Pid"], it.job.status().launches) == (begun, agent, 1)

    state = memory.load(name)
    assert state is not None
    memory.save(name, dataclasses.replace(state, reason=f"{STUMBLES}ConnectionError: busy; it tries again"))
    kill(second)
    another_life(it, second)
    wait_for(lambda: it.job.status().reason == "", "the stumble of a life that is past to be forgotten", 30)
    it.finish()


def test_supervisor_that_is_refused_when_it_begins_and_when_it_ends_tries_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray
    from resilience.integrations.ray import JobBuilder, memory, supervisor

    tries: list[str] = []

    def begin_life(name: str, mark: str) -> None:
        tries.append(mark)
        if len(tries) < 3:
            raise ConnectionError("the cluster's store is out of reach")
        begin(name, mark)

    def end(actor: Any, **more: Any) -> None:
        if actor._actor_id == its_name._actor_id:
            tries.append("end")
            if tries.count("end") < 3:
                raise ConnectionError("the cluster's store is out of reach")
        kill_actor(actor, **more)

    begin, kill_actor = memory.begin_life, ray.kill
    monkeypatch.setattr(memory, "begin_life", begin_life)
    monkeypatch.setattr(ray, "kill", end)
    monkeypatch.setattr(supervisor, "_AFTER_A_MISTAKE_S", 0.05)
    spec = JobBuilder().name("begins").train(SCRIPT, site.folder, 5).resources_per_node(nowhere=1).build().spec
    its_name = ray.remote(Named).options(name="begins", namespace=memory.NAMESPACE, num_cpus=0).remote()
    assert supervisor.Supervisor("begins", "ab", "", spec.as_text()).ready() == ""
    wait_for(lambda: "it waits" in state_of("begins").reason, "it to look for nodes")
    memory.ask_to_stop("begins", "ab")
    wait_for(lambda: ray._private.state.actors(its_name._actor_id.hex())["State"] == "DEAD", "the supervisor's end")
    said = capfd.readouterr().err
    assert said.count("the supervisor stumbles: ConnectionError: the cluster's store is out of reach") == 1
    assert "Traceback" not in said


class Named:
    """An actor that has a supervisor's name."""


def state_of(name: str) -> Any:
    from resilience.integrations.ray import memory

    return memory.load(name)


def test_submission_whose_runtime_env_can_not_be_set_up_says_so_in_a_sentence_and_leaves_the_name_free(
    site: Site,
) -> None:
    site.cluster.some(1)
    code = (
        "import ray; from resilience.integrations.ray import JobBuilder, RayJobError\n"
        f"ray.init(address={site.cluster.address!r}, log_to_driver=False,\n"
        "    runtime_env={'working_dir': 'gcs://_ray_pkg_0123456789abcdef.zip'})\n"
        "for _ in range(2):\n"
        "    try: JobBuilder().name('no-env').train('train.py').build().submit()\n"
        "    except RayJobError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **ENVIRONMENT},
    )
    said = [
        line for line in done.stdout.splitlines() if line.startswith("job 'no-env' was not started: its supervisor")
    ]
    assert (done.returncode, len(said)) == (0, 2), done.stdout + done.stderr
    assert "RuntimeEnvSetupError: " in said[0]


def test_entry_that_another_version_has_written_is_told_in_a_sentence(site: Site) -> None:
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
    from resilience.integrations.ray import JobBuilder, RayJobError, attach, memory

    def newer(what: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        key = memory._key("versions", what)
        data = change(json.loads(_internal_kv_get(key, namespace=memory._ROOM)))
        _internal_kv_put(key, json.dumps(data).encode(), overwrite=True, namespace=memory._ROOM)

    job = JobBuilder().name("versions").train("train.py").build()
    memory.open_entry("versions", memory.Submission(job.spec.as_text(), "ab"))
    newer("state", lambda it: {**it, "newer": 1})
    newer("job", lambda it: {**it, "spec": json.dumps({**json.loads(it["spec"]), "newer": 1})})
    for call in (job.status, job.wait, lambda: attach("versions")):
        with pytest.raises(RayJobError, match=r"can't be read \(.*newer.*Another version of resilience has written it"):
            call()
    newer("job", lambda it: {**it, "newest": 1})
    again = JobBuilder().name("versions").train("train.py").resources_per_node(nowhere=1).build().submit()
    wait_for(lambda: "it waits" in again.status().reason, "the next job of that name to begin")
    assert again.stop(60).phase == "STOPPED"


def test_stop_of_a_job_whose_name_another_one_has_by_now_leaves_that_one_alone(site: Site) -> None:
    from resilience.integrations.ray import JobBuilder, RayJobError, attach

    def waiting() -> Any:
        it = JobBuilder().name("followed").train("train.py").resources_per_node(nowhere=1).build().submit()
        wait_for(lambda: "it waits" in it.status().reason, "it to look for nodes")
        return it

    first = waiting()
    found = attach("followed")
    assert first.stop(60).phase == "STOPPED"
    second = waiting()
    for it in (first, found):
        for call in (it.stop, it.wait, it.status):
            with pytest.raises(RayJobError, match="another one was submitted under its name"):
                call()
    assert second.status().phase == "GATHERING", "nobody has asked it to stop"
    assert attach("followed").stop(60).phase == "STOPPED"
    assert second.status().phase == "STOPPED"


def test_submission_whose_supervisor_takes_too_long_is_waited_for_and_not_taken_for_the_job_before(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resilience.integrations.ray import JobBuilder, RayJobError
    from resilience.integrations.ray import job as submitting

    it = JobBuilder().name("late").train("train.py").resources_per_node(nowhere=1).build()
    assert it.submit().stop(60).phase == "STOPPED"
    monkeypatch.setattr(submitting, "_READY_S", 0.01)
    with pytest.raises(RayJobError, match=r"wait\(\) waits for it"):
        it.submit()
    assert it.status().phase == "GATHERING"
    with pytest.raises(TimeoutError):
        it.wait(5)
    assert "it waits" in it.status().reason
    assert it.stop(60).phase == "STOPPED"


@pytest.mark.parametrize("seen", [True, False])
def test_waiter_whose_jobs_name_was_taken_by_another_job_is_not_told_of_that_ones_end(site: Site, seen: bool) -> None:
    import ray
    from resilience.integrations.ray import JobBuilder, RayJobError, memory
    from resilience.integrations.ray.state import Phase, State

    job = JobBuilder().name(f"taken-{seen}").train("train.py").build()
    memory.open_entry(job.name, memory.Submission(job.spec.as_text(), "aa"))
    memory.save(job.name, State(Phase.SUCCEEDED if seen else Phase.RUNNING, exit_code=0 if seen else None))
    its_name = ray.remote(Named).options(name=job.name, namespace=memory.NAMESPACE, num_cpus=0).remote()
    told: list[Any] = []

    def wait() -> None:
        try:
            told.append(job.wait(60).phase)
        except RayJobError as error:
            told.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(2.0)
    assert not told, "its supervisor is there"
    memory.open_entry(job.name, memory.Submission(job.spec.as_text(), "bb"))
    memory.save(job.name, State(Phase.FAILED, exit_code=77))
    waiter.join(30)
    ray.kill(its_name)
    assert told == ["SUCCEEDED"] if seen else "another one was submitted under its name" in told[0]


HURRIED = """
from resilience.integrations.ray import fence, silence
fence.ORPHANED_S, silence._PATIENCE_S = 20.0, 10.0
"""
STUCK = """
import time
if "default_worker.py" in open("/proc/self/cmdline").read():
    time.sleep(10_000)
"""


def node_with(site: Site, pen: str, code: str) -> str:
    """Have a node whose workers run this when they start."""
    folder = site.folder / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return site.own_node(pen, PYTHONPATH=str(folder))


@pytest.mark.rare
def test_supervisor_that_hangs_and_nobody_waits_for_is_restarted_by_its_nodes_and_training_goes_on(site: Site) -> None:
    node_with(site, "hurried", HURRIED)
    it = site.training(1, labels={"pen": "hurried"}, detached=True)
    first, begun = it.actor("Supervisor"), starts(it.folder)
    os.kill(int(first["Pid"]), signal.SIGSTOP)
    another_life(it, first, 150)
    assert not jobs.alive(int(first["Pid"]))
    it.await_steps(20)
    assert starts(it.folder) == begun, "nobody has ended what trains"
    it.finish()


@pytest.mark.rare
def test_launcher_whose_supervisor_was_ended_for_good_saves_before_it_leaves(site: Site) -> None:
    import ray
    from resilience.integrations.ray import memory

    node_with(site, "orphaned", HURRIED)
    it = site.training(1, labels={"pen": "orphaned"}, detached=True)
    ray.kill(ray.get_actor(it.job.name, namespace=memory.NAMESPACE), no_restart=True)
    wait_for(lambda: not it.actor("NodeAgent"), "its node to be given back", 120)
    last = losses(site.folder)[-1][0]
    it.job.submit()
    it.await_steps()
    made = [step for step, _ in losses(site.folder)]
    assert made == list(range(len(made))), f"no step twice, none left out, beyond {last}"
    it.finish()


@pytest.mark.rare
def test_node_whose_workers_hang_when_they_start_is_left_for_one_whose_workers_do_not(site: Site) -> None:
    bad = node_with(site, "stuck", STUCK)
    it = site.planned(1, labels={"pen": "stuck"})
    it.job.submit()
    wait_for(lambda: it.job.status().nodes and it.node(0) == bad, "the bad node to be taken")
    spare = site.own_node("stuck")
    wait_for(
        lambda: "Ray has not brought up the actor of node 0 yet" in it.job.status().reason, "the status to say it", 90
    )
    wait_for(lambda: it.node(0) == spare, lambda: f"the spare to be taken:\n{it.words()}", 240)
    it.await_steps()
    history = it.job.status().history
    assert any("node 0 (127.0.0.1) was lost: Ray has not brought its actor up" in line for line in history), history
    it.finish()
