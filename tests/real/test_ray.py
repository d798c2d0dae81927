"""Jobs on a real Ray cluster, with real training over gloo: whatever is killed, the losses are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import jobs
from tests.jobs import WORKLOADS, wait_for
from tests.real.ray_cluster import ENVIRONMENT, RayCluster
from tests.real.ray_training import (
    PATIENCE_S,
    PAUSE,
    QUICK,
    RENDEZVOUS,
    SCRIPT,
    STEPS,
    Site,
    Training,
    Undisturbed,
    kill,
    losses,
    starts,
    submitted_elsewhere,
    tier,
)

pytestmark = pytest.mark.timeout(900)


# -- one job on four nodes in two racks, to which one thing after the other happens ---------------------------------------


@pytest.fixture(scope="class")
def four(
    ray_cluster: RayCluster, undisturbed: Undisturbed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    """It trains through all tests of a class, and its losses are right at their end."""
    with Site(ray_cluster, tmp_path_factory.mktemp("four"), undisturbed) as site:
        for rack in "aabb":
            site.own_node("four", rack)
        it = site.training(4, labels={"pen": "four"}, threshold=4, replicas=1)
        yield it
        it.finish()


class TestFailuresInARowAreEachHandledLikeTheFirst:
    def test_actor_killed_takes_its_launcher_with_it_and_both_come_back(self, four: Training) -> None:
        home, before = four.node(1), four.job.status().launches
        four.survives(lambda: kill(four.actor("NodeAgent", home)))
        assert four.node(1) == home
        assert four.job.status().launches == before + 1
        assert [line[3] for line in sorted(starts(four.folder)[-4:])] == ["a", "a", "b", "b"], "contiguous in a group"

    def test_node_killed_is_replaced_in_its_rack(self, four: Training) -> None:
        spares = []

        def replaced() -> None:
            four.site.cluster.kill(four.node(3))
            spares.append(four.site.own_node("four", "b"))

        four.survives(replaced)
        assert [four.node(3)] == spares
        status = four.job.status()
        assert (status.moves, [one.rack for one in status.nodes]) == (0, ["a", "a", "b", "b"])

    def test_group_moves_when_its_lost_node_has_no_replacement(self, four: Training) -> None:
        for _ in range(2):
            four.site.own_node("four", "c")
        before = four.job.status()
        four.survives(lambda: four.site.cluster.kill(four.node(1)))
        after = four.job.status()
        assert [one.rack for one in after.nodes] == ["c", "c", "b", "b"]
        assert [one.node for one in after.nodes[2:]] == [one.node for one in before.nodes[2:]]
        assert after.moves == before.moves + 1


# -- programs that submit ---------------------------------------------------------------------------------------------------


def test_killed_driver_leaves_a_detached_job_that_another_one_finds(site: Site) -> None:
    from resilience.integrations.ray import RayJobError, attach

    # Larger than what Ray keeps with an actor itself: it must not be lost with the driver.
    it = site.planned(2, detached=True, environment={"LONG": "x" * 120_000})
    with submitted_elsewhere(it) as driver:
        it.await_steps()
        driver.kill()
        driver.wait()
    it.await_steps(20)
    first = it.actor("Supervisor")
    kill(first)
    wait_for(lambda: it.actor("Supervisor").get("Pid", first["Pid"]) != first["Pid"], "the supervisor to be back")
    with pytest.raises(RayJobError, match=f"Did you mean '{it.job.name}'"):
        attach(f"{it.job.name}x")
    found = attach(it.job.name)
    assert found.spec == it.job.spec
    assert found.status().launches == 2
    it.finish()


def test_driver_that_dies_takes_a_job_with_it_that_is_not_detached(site: Site) -> None:
    it = site.planned(2)
    with submitted_elsewhere(it) as driver:
        it.await_steps()
        driver.kill()
        driver.wait()
    status = it.job.wait(PATIENCE_S)
    assert (status.phase, status.reason) == ("STOPPED", "the program that submitted it is gone")
    it.assert_nothing_left()


# -- one job on two nodes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def two(
    ray_cluster: RayCluster, undisturbed: Undisturbed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    """It trains through all tests of a class, and its losses are right at their end."""
    with Site(ray_cluster, tmp_path_factory.mktemp("two"), undisturbed) as site:
        it = site.training(2, room=3)
        yield it
        it.finish()


class TestWhatBefallsAJobIsOverWhenTheNextThingDoes:
    def test_killed_rank_is_restored_from_memory_without_anybody_of_ray_noticing(self, two: Training) -> None:
        two.await_steps(8)
        launches, before = two.job.status().launches, len(losses(two.folder))
        two.survives(lambda: two.order(1, "kill"))
        assert two.job.status().launches == launches
        assert {tier(two, node) for node in range(2)} == {"memory"}
        made = [step for step, _ in losses(two.folder)[before - 1 :]]
        assert len(made) == len(set(made)), "steps were made twice, so it was not the newest snapshot"

    def test_supervisor_killed_comes_back_and_disturbs_nobody(self, two: Training) -> None:
        first, begun = two.actor("Supervisor"), len(starts(two.folder))
        kill(first)
        wait_for(lambda: two.actor("Supervisor").get("Pid", first["Pid"]) != first["Pid"], "the supervisor to be back")
        homes = {life["Address"]["NodeID"] for life in (first, two.actor("Supervisor"))}
        assert homes == {two.site.cluster.head()}, "it stands on the head, in each of its lives"
        two.await_steps()
        assert len(starts(two.folder)) == begun
        two.survives(lambda: kill(two.actor("NodeAgent", two.node(1))))  # it acts as the first one did

    def test_node_with_broken_hardware_is_left_and_not_used_again(self, two: Training) -> None:
        broken, healthy = two.node(1), two.node(0)
        two.survives(lambda: two.order(1, "exit 201"))
        assert two.node(1) not in (broken, healthy)
        assert two.node(0) == healthy
        assert list(two.job.status().excluded) == [broken]

    def test_lost_node_without_copies_gets_its_state_back_from_disk(self, two: Training) -> None:
        two.site.cluster.add(RACK_ID="a")
        two.survives(lambda: two.site.cluster.kill(two.node(1)))
        assert {tier(two, node) for node in range(2)} == {"disk"}


# -- what else may happen, on two nodes ---------------------------------------------------------------------------------


@pytest.mark.rare
def test_supervisor_that_can_not_read_its_state_fails_the_job_and_gives_everything_back(site: Site) -> None:
    from ray.experimental.internal_kv import _internal_kv_put
    from resilience.integrations.ray import RayJobError, memory

    it = site.training(1, room=2)
    _internal_kv_put(memory._key(it.job.name, "state"), b"{", overwrite=True, namespace=memory._ROOM)
    kill(it.actor("Supervisor"))

    def readable() -> bool:
        try:
            return bool(it.job.status())
        except RayJobError:
            return False

    wait_for(readable, "the supervisor's next life to say that the job has failed")
    status = it.job.wait(PATIENCE_S)
    assert (status.phase, status.exit_code) == ("FAILED", 1), str(status)
    it.assert_nothing_left()


@pytest.mark.rare
def test_lost_store_has_the_job_form_again_with_another(site: Site) -> None:
    it = site.training(2)
    it.survives(lambda: kill(it.actor("StoreKeeper")))
    assert it.job.status().round == 2
    it.finish()


@pytest.mark.rare
def test_store_that_hangs_has_the_job_form_again_with_another(site: Site) -> None:
    it = site.training(2)
    (store,) = jobs.children(int(it.actor("StoreKeeper")["Pid"]))
    it.survives(lambda: os.kill(store, signal.SIGSTOP))
    assert it.job.status().round == 2
    wait_for(lambda: not jobs.alive(store), "the store that hangs to be ended")
    it.finish()


@pytest.mark.rare
def test_launcher_on_a_node_that_ray_gave_up_ends_and_the_job_goes_on_elsewhere(site: Site) -> None:
    it = site.training(2, room=3)
    home = it.node(1)
    agent = int(it.actor("NodeAgent", home)["Pid"])
    variables = Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
    (raylet,) = [int(word.partition(b"=")[2]) for word in variables if word.startswith(b"RAY_RAYLET_PID=")]
    try:
        it.survives(lambda: os.kill(raylet, signal.SIGSTOP))
        wait_for(lambda: not jobs.alive(agent), "the actor on the node that Ray gave up to end")
        assert it.node(1) not in (home, "")
    finally:
        os.kill(raylet, signal.SIGCONT)
        site.cluster.kill(home)
    it.finish()


@pytest.mark.rare
def test_actor_that_hangs_is_replaced_and_its_launcher_with_it(site: Site) -> None:
    it = site.training(2)
    agent = int(it.actor("NodeAgent", it.node(1))["Pid"])

    def hang() -> None:
        os.kill(agent, signal.SIGSTOP)
        (launcher,) = [pid for pid in jobs.children(agent) if "resilience.run" in jobs.command_line(pid)]
        os.kill(launcher, signal.SIGKILL)
        wait_for(lambda: any("has not answered" in line for line in it.job.status().history), "that to be seen", 150)

    it.survives(hang)
    wait_for(lambda: not jobs.alive(agent), "the actor that hangs to be ended")
    it.finish()


@pytest.mark.rare
def test_launcher_that_hangs_below_a_healthy_actor_is_ended_and_all_form_again(site: Site) -> None:
    it = site.planned(2)
    it.job = it.builder().rendezvous(**RENDEZVOUS, join_timeout=30).build()
    it.job.submit()
    it.await_steps(5)
    agent = int(it.actor("NodeAgent", it.node(1))["Pid"])
    (launcher,) = [pid for pid in jobs.children(agent) if "resilience.run" in jobs.command_line(pid)]
    it.survives(lambda: os.kill(launcher, signal.SIGSTOP))
    assert any("the launcher of node 1: held for hung and ended" in line for line in it.job.status().history)
    assert not jobs.alive(launcher)
    it.finish()


def test_actor_whose_job_has_no_supervisor_any_more_gives_its_place_back(site: Site) -> None:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Agent:
        def leave(self) -> None:
            from resilience.integrations.ray import fence

            threading.Thread(target=fence.leave, args=(fence.Verdict.ORPHANED,)).start()

    site.cluster.some(1)
    group = placement_group([{"CPU": 1}], name="orphan", lifetime="detached")
    actor = (
        ray.remote(Agent)
        .options(
            name="orphan",
            lifetime="detached",
            max_restarts=-1,
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        .remote()
    )
    actor.leave.remote()  # it may not live to answer
    wait_for(lambda: placement_group_table(group)["state"] == "REMOVED", "its place to be given back")
    wait_for(lambda: ray._private.state.actors(actor._actor_id.hex())["State"] == "DEAD", "its end")


@pytest.mark.rare
def test_placement_group_of_somebody_else_with_a_name_like_the_jobs_stays(site: Site) -> None:
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    it = site.planned(1, room=2)
    theirs = placement_group([{"CPU": 0.1}], name=f"{it.job.name}/mine", lifetime="detached")
    try:
        it.job.submit()
        it.await_steps()
        it.job.stop(PATIENCE_S)
        assert placement_group_table(theirs)["state"] == "CREATED"
    finally:
        remove_placement_group(theirs)


def test_job_that_was_stopped_goes_on_where_it_was_when_submitted_again(site: Site) -> None:
    it = site.training(2)
    status = it.job.stop(PATIENCE_S)
    assert (status.phase, status.exit_code, status.reason) == ("STOPPED", 79, "a stop was asked for")
    it.assert_nothing_left()
    last = losses(site.folder)[-1][0]
    it.job.submit()
    it.await_steps()
    made = [step for step, _ in losses(site.folder)]
    assert made == list(range(len(made))), f"no step twice, none left out, beyond {last}"
    it.finish()


def test_failure_that_no_restart_can_help_ends_the_job_with_its_cause(site: Site) -> None:
    site.cluster.some(2)
    script = site.folder / "fails.py"
    script.write_text("import resilience\nresilience.heartbeat(1)\nraise ValueError('never')\n")
    from resilience.integrations.ray import JobBuilder

    builder = JobBuilder().name("fails").nodes(2).train(str(script)).settings(**QUICK).rendezvous(**RENDEZVOUS)
    job = builder.environment({"PROGRESS": str(site.folder)}).run_dir(str(site.folder / "run")).build()
    status = job.submit().wait(PATIENCE_S)
    assert (status.phase, status.exit_code) == ("FAILED", 77), str(status)
    assert "restarting can't help; rank " in status.reason
    assert "ValueError: never; reports and logs of that node: " in status.reason


def test_job_of_the_same_name_submitted_at_the_same_moment_is_refused_and_changes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resilience.integrations.ray import JobBuilder, RayJobError, attach
    from resilience.integrations.ray import job as submitting

    site.cluster.some(1)
    winner, loser = (
        JobBuilder()
        .name("one-name")
        .train(SCRIPT, site.folder, 900, PAUSE, 0, who)
        .run_dir(site.folder / "run")
        .build()
        for who in ("winner", "loser")
    )
    await_gone = submitting._await_gone

    def overtaken(ray: Any, name: str) -> None:
        """The other one comes after this one has seen that the name is free."""
        await_gone(ray, name)
        monkeypatch.setattr(submitting, "_await_gone", await_gone)
        winner.submit()

    monkeypatch.setattr(submitting, "_await_gone", overtaken)
    with pytest.raises(RayJobError, match="a job 'one-name' is submitted on this cluster"):
        loser.submit()
    with pytest.raises(RayJobError, match="finds it; stop it first"):
        loser.submit()
    assert attach("one-name").spec == winner.spec
    assert winner.stop(PATIENCE_S).over


def test_supervisor_that_ray_refuses_again_and_again_says_so_in_the_status(site: Site) -> None:
    from resilience.integrations.ray import JobBuilder

    site.cluster.some(1)
    builder = JobBuilder().name("refused").train(SCRIPT, site.folder, 5).run_dir(site.folder / "run")
    job = builder.resources_per_node(CPU=1, neuron_cores=1.5).build().submit()  # whole ones only, says Ray
    wait_for(lambda: "the supervisor stumbles: " in job.status().reason, "the status to say it")
    assert "tries again" in str(job.status())
    assert job.stop(PATIENCE_S).phase == "STOPPED"


@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
def test_job_asked_for_where_there_is_no_cluster_says_so_and_starts_none(tmp_path: Path, address: str) -> None:
    code = (
        "import ray._private.services as machine; machine._find_address_from_flag = lambda flag: set()\n"  # nor anybody else's
        "from resilience.integrations.ray import JobBuilder, RayJobError, attach\n"
        "job = JobBuilder().name('nowhere').train('train.py').build()\n"
        "for call in (job.status, job.wait, job.stop, lambda: attach('nowhere')):\n"
        "    try: call()\n"
        "    except RayJobError as error: print(error)\n"
    )
    variables = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**variables, **ENVIRONMENT, "RAY_TMPDIR": str(tmp_path), **({"RAY_ADDRESS": address} if address else {})},
        timeout=120,
    )
    lines = [
        line for line in done.stdout.splitlines() if line.startswith("this program is connected to no Ray cluster")
    ]
    assert len(lines) == 4, done.stdout + done.stderr
    assert all(f"nobody answers at {address}" in line for line in lines if address)


def test_function_is_called_with_arguments_and_configuration(site: Site) -> None:
    from omegaconf import OmegaConf

    it = site.planned(2)
    builder = (
        it.builder()
        .train("tests.workloads.ray_steps.called", str(site.folder), STEPS)
        .config(OmegaConf.create({"pause": PAUSE}))
    )
    it.job = builder.working_dir(str(WORKLOADS.parent.parent)).build()
    it.job.submit()
    it.await_steps()
    it.finish()
