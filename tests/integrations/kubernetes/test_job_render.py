"""A training job to start from: it is whole, the client's typed models know every field of it, and its command line runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("resilience.integrations.kubernetes.job", reason="not installed here: resilience.integrations")

from resilience.integrations.kubernetes.cli import main
from resilience.integrations.kubernetes.job.render import failure_rules, notes, render
from resilience.integrations.kubernetes.job.values import JobValues, ValuesError, documentation, from_mapping

from resilience.failover import exits
from resilience.failover.failure import HARDWARE_CODES
from tests.ports import free_port

MODELS = {"Job": "V1Job", "Service": "V1Service", "PersistentVolumeClaim": "V1PersistentVolumeClaim"}
LLM: dict[str, Any] = {"name": "llm", "image": "registry/llm:1", "script": ["train.py", "--lr", "0.1"]}
FULL: dict[str, Any] = {
    **LLM,
    "namespace": "team",
    "nodes": 4,
    "min_nodes": 2,
    "gpus_per_node": 8,
    "snapshot_state": "40Gi",
    "replicas": 1,
    "checkpoint_size": "1Ti",
    "storage_class": "fast",
    "network_check": True,
    "accelerator": "nvidia",
    "launcher_args": ["--exclude-straggler"],
    "env": {"NCCL_DEBUG": "WARN"},
    "gang": "t9k",
    "queue": "night",
    "priority": 50,
    "active_deadline": 3600,
    "ttl_after_finished": 60,
    "node_selector": {"gpu": "h100"},
    "priority_class": "high",
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
}


def made(**values: Any) -> dict[str, dict[str, Any]]:
    """The objects of a job, by kind."""
    return {thing["kind"]: thing for thing in render(from_mapping({**LLM, **values}))}


def container(things: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (only,) = things["Job"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


# -- what the API knows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [LLM, FULL, {**LLM, "nodes": 2}, {**FULL, "controller": True}])
def test_typed_models_of_the_client_know_every_field_that_is_rendered(values: dict[str, Any]) -> None:
    client = pytest.importorskip(
        "kubernetes.client", reason="not here: the package kubernetes. Left out are its typed models"
    )
    with client.ApiClient() as api:
        for thing in render(from_mapping(values)):
            if thing["kind"] in MODELS:
                answer = type("Answer", (), {"data": json.dumps(thing)})
                model = api.deserialize(answer, MODELS[thing["kind"]])
                assert api.sanitize_for_serialization(model) == thing


def test_objects_come_in_the_order_in_which_they_are_needed() -> None:
    assert [thing["kind"] for thing in render(from_mapping(FULL))] == [
        "PersistentVolumeClaim",
        "Service",
        "PodGroup",
        "Job",
    ]
    assert [thing["kind"] for thing in render(from_mapping(LLM))] == ["Job"]


def test_job_of_several_nodes_needs_nothing_that_a_plain_cluster_lacks_unless_a_gang_scheduler_is_named() -> None:
    things = made(nodes=4, gpus_per_node=8)
    assert {kind: thing["apiVersion"] for kind, thing in things.items()} == {"Service": "v1", "Job": "batch/v1"}
    assert "schedulerName" not in things["Job"]["spec"]["template"]["spec"]
    assert set(made(nodes=4, gang="t9k")) == {"Service", "PodGroup", "Job"}


def test_every_object_is_in_the_namespace_and_carries_the_jobs_label() -> None:
    for thing in render(from_mapping(FULL)):
        assert thing["metadata"]["namespace"] == "team"
        assert thing["kind"] == "PodGroup" or thing["metadata"]["labels"]["resilience.dev/job"] == "llm"


# -- how nodes find one another ---------------------------------------------------------------------------------------


def test_service_names_the_pods_before_they_are_ready_and_selects_them() -> None:
    things = made(nodes=3)
    service, template = things["Service"]["spec"], things["Job"]["spec"]["template"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == things["Service"]["metadata"]["name"] == "llm"
    assert "--rdzv-endpoint=llm-0.llm:29400" in container(things)["args"]


def test_job_is_indexed_with_a_pod_for_each_node() -> None:
    spec = made(nodes=3)["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_one_node_needs_no_service_and_no_rendezvous() -> None:
    things = made()
    assert set(things) == {"Job"}
    assert container(things)["command"] == ["resilience", "run"]
    assert not [word for word in container(things)["args"] if word.startswith("--rdzv")]


def test_store_of_its_own_is_used_by_all() -> None:
    run = container(made(nodes=2, store="head:29400"))
    assert run["command"] == ["resilience", "run", "--rdzv-conf=is_host=false"]
    assert "--rdzv-endpoint=head:29400" in run["args"]


def test_fewer_nodes_may_do_and_the_job_is_then_done_when_pod_0_is() -> None:
    things = made(nodes=4, min_nodes=2, gang="t9k")
    assert "--nnodes=2:4" in container(things)["args"]
    assert things["PodGroup"]["spec"]["minMember"] == 2
    assert things["Job"]["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert "successPolicy" not in made(nodes=4)["Job"]["spec"]


# -- what it is given -------------------------------------------------------------------------------------------------


def test_memory_holds_training_shared_memory_and_the_snapshots() -> None:
    things = made(nodes=2, memory="10Gi", shm="2Gi", snapshot_state="4Gi")
    limits = container(things)["resources"]["limits"]
    assert limits["memory"] == f"{(10 + 2 + 3 * 4) * 1024}Mi"
    with_copies = made(nodes=2, memory="10Gi", shm="0", snapshot_state="4Gi", replicas=1)
    assert container(with_copies)["resources"]["limits"]["memory"] == f"{(10 + (4 + 2) * 4) * 1024}Mi"
    assert container(things)["resources"]["requests"]["memory"] == limits["memory"]
    volumes = {volume["name"]: volume for volume in things["Job"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shm"] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}


def test_a_rank_for_each_gpu() -> None:
    run = container(made(gpus_per_node=8))
    assert "--nproc-per-node=8" in run["args"]
    assert run["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_pod_has_more_time_to_end_than_its_launcher_takes() -> None:
    things = made(stop_grace=100)
    assert "--ft-stop-grace=100" in container(things)["args"]
    assert things["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 100


def test_pods_join_the_group_that_is_rendered() -> None:
    things = made(nodes=2, gang="t9k", queue="night", priority=7)
    template = things["Job"]["spec"]["template"]
    assert things["PodGroup"]["spec"] == {"minMember": 2, "queue": "night", "priority": 7}
    assert (
        template["metadata"]["labels"]["scheduler.tensorstack.dev/group-name"] == things["PodGroup"]["metadata"]["name"]
    )
    assert template["spec"]["schedulerName"] == "t9k-scheduler"


@pytest.mark.parametrize(("gang", "name"), [("coscheduling", "scheduler-plugins-scheduler"), ("volcano", "volcano")])
def test_other_gang_schedulers_do_as_well(gang: str, name: str) -> None:
    things = made(nodes=2, gang=gang)
    assert things["PodGroup"]["spec"]["minMember"] == 2
    assert things["Job"]["spec"]["template"]["spec"]["schedulerName"] == name


def test_controller_makes_the_group_where_there_is_one() -> None:
    from resilience.integrations.kubernetes.podgroups import wish

    values = {"nodes": 4, "min_nodes": 2, "gang": "t9k", "queue": "night", "priority": 7}
    things = made(**values, controller=True)
    assert "PodGroup" not in things
    wanted = wish(things["Job"])
    assert wanted is not None
    assert wanted.group == from_mapping({**LLM, **values}).group()


def test_pods_get_no_token_of_the_cluster() -> None:
    assert made()["Job"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_node_and_its_group_are_told_by_the_cluster() -> None:
    run = container(made())
    told = {item["name"]: item["valueFrom"]["fieldRef"]["fieldPath"] for item in run["env"] if "valueFrom" in item}
    assert told["RESILIENCE_NODE_NAME"] == "spec.nodeName"
    assert told["RESILIENCE_NODE_GROUP"] == "metadata.labels['scheduling/rack-id']"
    assert told["RESILIENCE_NODE_GROUP_INDEX"] == "metadata.labels['scheduling/rack-group']"
    used = set(re.findall(r"\$\((\w+)\)", " ".join(run["args"])))
    assert used <= set(told)


def test_jobs_uid_comes_from_the_label_that_pods_have_on_kubernetes_1_26_too() -> None:
    told = {item["name"]: item["valueFrom"]["fieldRef"]["fieldPath"] for item in container(made(nodes=2))["env"]}
    assert told["JOB_UID"] == "metadata.labels['controller-uid']"
    assert "batch.kubernetes.io" not in str(told), "labels of that kind came with 1.27"


@pytest.mark.parametrize("nodes", [1, 3])
def test_pods_stay_away_from_a_rack_that_their_group_has_left(nodes: int) -> None:
    from resilience.integrations.kubernetes.placement import avoids

    template = made(nodes=nodes, namespace="team")["Job"]["spec"]["template"]
    assert avoids(template, "team", template["metadata"]["labels"]["resilience.dev/job"])


def test_node_check_is_a_value_and_its_flags_are_the_launchers() -> None:
    from resilience.launcher.cli import Parser, add_settings, settings_from

    def asked(**values: Any) -> tuple[bool, str]:
        parser = Parser()
        add_settings(parser)
        nodes = settings_from(parser.parse_known_args(container(made(**values))["args"])[0]).nodes
        return nodes.network_check, nodes.accelerator

    assert asked() == (False, "auto")
    assert asked(network_check=True) == (True, "auto")
    assert asked(network_check=True, accelerator="cpu", nodes=2) == (True, "cpu")


# -- what follows an exit code ----------------------------------------------------------------------------------------


def what_follows(code: int) -> str:
    """What Kubernetes does when the container ends with a code: the first rule that fits."""
    for rule in failure_rules():
        if code in rule.get("onExitCodes", {}).get("values", []):
            return str(rule["action"])
    return "Count"


def test_every_exit_code_of_the_launcher_has_its_consequence() -> None:
    assert what_follows(exits.ABORTED) == what_follows(exits.SHUT_DOWN) == what_follows(exits.USAGE) == "FailJob"
    assert what_follows(exits.PREEMPTED) == what_follows(exits.NODE_LEFT) == what_follows(exits.UNFIT) == "Ignore"
    assert {what_follows(code) for code in HARDWARE_CODES if code != 128} == {"Ignore"}
    assert what_follows(exits.FAILED) == what_follows(exits.CUT_OFF) == what_follows(137) == "Count"


def test_command_that_an_image_does_not_have_does_not_go_on_for_ever() -> None:
    """A container that can't be started ends with 128, which is also the hardware's."""
    assert 128 in HARDWARE_CODES
    assert what_follows(128) == "Count"


def test_rules_are_as_the_api_wants_them() -> None:
    for rule in failure_rules():
        values = rule.get("onExitCodes", {}).get("values", [1])
        assert values == sorted(set(values))
        assert 0 not in values
    assert failure_rules()[0]["onPodConditions"], "an evicted Pod is not looked at for its code"


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodse": 2}, "unknown value 'nodse'.*Did you mean 'nodes'"),
        ({"nodes": "2"}, "nodes is '2': it must be a whole number"),
        ({"nodes": 0}, "nodes is 0: it must be at least 1"),
        ({"nodes": True}, "nodes is True"),
        ({"min_nodes": 3, "nodes": 2}, "min_nodes is 3, above nodes, 2"),
        ({"name": "2llm"}, "can't be used"),
        ({"name": "l" * 62, "nodes": 100}, "is a host name"),
        ({"image": ""}, "image is missing"),
        ({"script": {"train.py": 1}}, "script is {'train.py': 1}: it must be a list of words"),
        ({"script": "train.py 'a"}, "which no shell can read"),
        ({"memory": "8 GB"}, "memory '8 GB' is no quantity"),
        ({"gang": "vulcano"}, "Did you mean 'volcano'"),
        ({"gang": "t9k", "priority": 200}, "from 0 to 100"),
        ({"priority": 7}, "priority is 7, which is for a gang scheduler, and gang is 'none'"),
        ({"queue": "night"}, "give gang, or leave queue out"),
        ({"controller": True}, "give gang, or leave controller out"),
        ({"scheduler_name": "mine"}, "give gang, or leave scheduler_name out"),
        ({"replicas": 1}, "copies on other nodes"),
        ({"store": "head"}, "write HOST:PORT"),
        ({"checkpoint_claim": "a", "checkpoint_size": "1Gi"}, "give one of them"),
        ({"image_pull_policy": "always"}, "Always, IfNotPresent or Never"),
        ({"env": ["A=1"]}, "names and texts"),
        ({"env": {"POD_NAME": "p"}}, "the job sets it itself"),
        ({"env": {"RESILIENCE_NODE_NAME": "n"}}, "the job sets it itself"),
        ({"controller": "yes"}, "true or false"),
        ({"accelerator": "nvidia"}, "network_check is off"),
    ],
)
def test_values_that_can_not_be_meant_raise(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValuesError, match=said):
        from_mapping({**LLM, **wrong})


def test_yes_and_no_of_a_variable_are_written_as_yaml_does() -> None:
    told = {item["name"]: item.get("value") for item in container(made(env={"A": True, "B": False, "C": 1}))["env"]}
    assert (told["A"], told["B"], told["C"]) == ("true", "false", "1")


def test_missing_volume_and_missing_snapshot_memory_are_said() -> None:
    said = " ".join(notes(from_mapping(LLM)))
    assert "no volume for checkpoints" in said
    assert "give snapshot_state" in said
    assert notes(from_mapping({**LLM, "checkpoint_claim": "c", "snapshot_state": "1Gi"})) == ()


@pytest.mark.parametrize(("name", "said"), [("nvida", "Did you mean 'nvidia'"), ("xxxx", "entry point of that name")])
def test_accelerator_that_is_not_known_here_is_said_for_the_image_may_have_it(name: str, said: str) -> None:
    quiet = {**LLM, "checkpoint_claim": "c", "snapshot_state": "1Gi", "network_check": True}
    (note,) = notes(from_mapping({**quiet, "accelerator": name}))
    assert said in note
    for known in ("nvidia", "nvidia.com/gpu", "my_check::Mine", ""):
        assert notes(from_mapping({**quiet, "accelerator": known})) == ()


def test_script_in_one_line_is_read_as_a_shell_does() -> None:
    values = from_mapping({**LLM, "script": "train.py --name 'two words'"})
    assert values.script == ("train.py", "--name", "two words")


# -- the command ------------------------------------------------------------------------------------------------------


def test_flags_and_a_values_file_make_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(
        yaml.safe_dump({**LLM, "nodes": 2, "checkpoint_claim": "c", "env": {"A": "1"}, "snapshot_state": "1Gi"})
    )
    assert main(["job", "render", "--values", str(file)]) == 0
    by_file = capsys.readouterr()
    flags = [
        "--name=llm",
        "--image=registry/llm:1",
        "--nodes=2",
        "--checkpoint-claim=c",
        "--env=A=1",
        "--snapshot-state=1Gi",
    ]
    assert main(["job", "render", *flags, "--", "train.py", "--lr", "0.1"]) == 0
    by_flags = capsys.readouterr()
    assert by_file.out == by_flags.out
    assert by_file.err == by_flags.err == ""
    assert [thing["kind"] for thing in yaml.safe_load_all(by_file.out)] == ["Service", "Job"]


def test_flags_go_before_the_values_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({**LLM, "nodes": 2}))
    assert main(["job", "render", "--values", str(file), "--nodes", "5"]) == 0
    job = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    assert job["spec"]["completions"] == 5


def test_printed_values_file_is_one_and_lists_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "values"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert list(found) == list(documentation())
    assert from_mapping({**found, **LLM}) == JobValues("llm", "registry/llm:1", ("train.py", "--lr", "0.1"))


# -- it runs ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "GROUP_RANK")
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as out:
    json.dump([int(os.environ[name]) for name in names], out)
"""


def filled(word: str, told: dict[str, str]) -> str:
    """A word of a command with its variables in it, as the kubelet fills them in."""
    return re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word)


@pytest.mark.spawns
def test_rendered_command_line_runs_on_two_nodes_that_the_job_numbers(tmp_path: Path) -> None:
    """Each container's command, as the kubelet would start it: variables filled in, index set. Names resolve to this host."""
    script, out, bin_ = tmp_path / "train.py", tmp_path / "out", tmp_path / "bin"
    script.write_text(SCRIPT)
    out.mkdir()
    bin_.mkdir()
    (bin_ / "resilience").write_text(f'#!/bin/sh\nexec {sys.executable} -m resilience "$@"\n')
    (bin_ / "resilience").chmod(0o755)
    run = container(
        made(name="demo", nodes=2, nproc_per_node=2, port=free_port(), script=[str(script), str(out)], checkpoint_claim="c",
             checkpoint_path=str(tmp_path / "checkpoints"))
    )  # fmt: skip
    running = []
    with tempfile.TemporaryDirectory(prefix="kj-") as short:  # sockets live in it
        for index in (1, 0):
            told = {
                "RESILIENCE_NODE_NAME": f"node-{index}",
                "POD_NAME": f"demo-{index}-x",
                "POD_IP": "127.0.0.1",
                "JOB_UID": "u",
            }
            words = [filled(word, told) for word in run["command"] + run["args"]]
            words = [word.replace("demo-0.demo:", "localhost:") for word in words]
            bare = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENCE_")}
            env = {**bare, **told, "JOB_COMPLETION_INDEX": str(index), "TMPDIR": short, "OMP_NUM_THREADS": "1"}
            env |= {
                "RESILIENCE_NODE_GROUP": "",
                "RESILIENCE_NODE_GROUP_INDEX": "",
                "PATH": f"{bin_}:{os.environ['PATH']}",
            }
            running.append(
                subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            said = [process.communicate(timeout=120)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
    assert [process.returncode for process in running] == [0, 0], said
    assert sorted(json.loads(file.read_text()) for file in out.iterdir()) == [
        [0, 4, 0],
        [1, 4, 0],
        [2, 4, 1],
        [3, 4, 1],
    ]
    assert sorted(folder.name for folder in (tmp_path / "checkpoints" / "runs").iterdir()) == ["demo-0-x", "demo-1-x"]


@pytest.mark.parametrize(
    "word",
    [
        "--nnodes=7",
        "--standalone",
        "--rdzv-endpoint=foo:1",
        "--rdzv_end=foo:1",
        "--ft-termination-log=/tmp/x",
        "--max-restarts=9",
    ],
)
def test_flags_that_would_undo_the_job_are_refused(word: str) -> None:
    with pytest.raises(ValuesError, match=f"launcher_args has '{word}'"):
        JobValues(name="a", image="b", script=("train.py",), launcher_args=(word,))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("memory", "64", "memory is 64, in bytes"),
        ("memory", "0", "memory is 0"),
        ("cpu", "0", "cpu is 0"),
        ("cpu", "٣", "is no quantity"),
        ("checkpoint_path", "/", "is taken"),
        ("checkpoint_path", "/dev/shm/", "is taken"),
        ("store", "h:99999", "write HOST:PORT"),
        ("image", "registry/llm: 1", "image: 'registry/llm: 1' can't be an image"),
        ("namespace", "Team A", "namespace: 'Team A' can't be a namespace"),
        ("service_account", "train_er", "service_account: 'train_er' can't be a name"),
        ("checkpoint_claim", "a/b", "checkpoint_claim: 'a/b' can't be a name"),
        ("image_pull_secrets", ["My Secret"], "image_pull_secrets: 'My Secret' can't be a name"),
        ("gpu_resource", "nvidia com", "gpu_resource: 'nvidia com' can't be the key"),
        ("env", {"1ST": "x"}, "env: '1ST' can't name a variable"),
        ("node_selector", {"a b": "c"}, "node_selector: 'a b' can't be the key"),
        ("node_selector", {"rack": "-7"}, "node_selector: '-7' can't be the value"),
    ],
)
def test_values_that_cant_be_meant_are_refused(name: str, text: Any, said: str) -> None:
    with pytest.raises(ValuesError, match=said):
        JobValues(**{"name": "a", "image": "b", "script": ("train.py",), name: text})
