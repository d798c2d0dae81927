"""The builder says everything once, and refuses what can't be meant when it is built, in words."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from resilience.integrations.ray import DLJobBuilder, Job, JobBuilder, JobSpec, words
from resilience.integrations.ray import options as launcher
from resilience.integrations.ray.builder import JobBuilder as Builder
from resilience.integrations.ray.state import Phase, State
from resilience.integrations.ray.status import status_of

from resilience.errors import ConfigError


def minimal() -> Any:
    return JobBuilder().train("train.py")


def test_smallest_job_is_one_node_with_one_rank() -> None:
    spec = minimal().build().spec
    assert (spec.nodes, spec.nproc_per_node, spec.bundle, spec.detached) == (1, 1, {"CPU": 1.0}, False)
    assert spec.name.startswith("train-")
    assert minimal().build().name != spec.name


def test_both_names_of_the_builder_are_one_class() -> None:
    assert DLJobBuilder is JobBuilder is Builder


def test_spec_is_the_same_after_it_was_sent() -> None:
    job = (
        JobBuilder()
        .name("llm")
        .config({"lr": 0.1, "layers": [1, 2]})
        .nodes(4, minimum=3)
        .nproc_per_node(8)
        .train("pkg.train.main", 1, "two", [3.0])
        .workload("trainer")
        .resources_per_node(CPU=16, GPU=8)
        .node_labels({"gpu": "h100"})
        .enable_node_group_failover("RACK_ID", 300, size=2)
        .settings(network_check=True, rank_heartbeat_timeout=math.inf)
        .rendezvous(last_call_timeout=5)
        .launcher_args("--redirects=3")
        .environment({"NCCL_DEBUG": "INFO"})
        .run_dir("/shared/runs/llm")
        .working_dir("/shared/code")
        .max_restarts(5)
        .max_failures(2)
        .detached()
        .build()
    )
    assert JobSpec.from_text(job.spec.as_text()) == job.spec


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (JobBuilder, "nothing to train"),
        (lambda: JobBuilder().train(print), "name it, as 'train.py'"),
        (lambda: JobBuilder().train("train"), "give a script"),
        (lambda: minimal().nodes(0), "nodes: 0 is not a whole number from 1 up"),
        (lambda: minimal().nodes("4"), "nodes: '4' is not a whole number"),
        (lambda: minimal().nodes(2, minimum=3), "a job of 2 nodes can't need at least 3"),
        (lambda: minimal().nproc_per_node(True), "nproc_per_node: True is not"),
        (lambda: minimal().nodes(3).enable_node_group_failover("RACK_ID", 300, size=2), "can't be divided"),
        (lambda: minimal().enable_node_group_failover("RACK ID"), "not the key of a Ray node label"),
        (lambda: minimal().enable_node_group_failover("RACK_ID", 0), "a threshold of 0 s can't be meant"),
        (lambda: minimal().enable_node_group_failover("RACK_ID", "300"), "a number of seconds, not '300'"),
        (lambda: minimal().enable_node_group_failover("R", 1).node_labels({"R": "a"}), "tells the groups apart"),
        (lambda: minimal().resources_per_node(GPU=0), "GPU=0 is not the name of a resource and an amount above 0"),
        (lambda: minimal().node_labels({"gpu": ""}), "not a Ray node label"),
        (lambda: minimal().name("a b"), "name 'a b'"),
        (lambda: minimal().workload(""), "workload ''"),
        (lambda: minimal().settings(netwerk_check=True), "Did you mean 'network_check'"),
        (lambda: minimal().settings(stop_grace="soon"), "stop_grace='soon'"),
        (lambda: minimal().settings(run_dir="/x"), "what the job tells each launcher itself"),
        (lambda: minimal().rendezvous(is_host=True), "an actor of its own"),
        (lambda: minimal().launcher_args("--nnodes=2"), "what the job tells each launcher itself"),
        (lambda: minimal().launcher_args("--rdzv_id=2"), "what the job tells each launcher itself"),
        (lambda: minimal().launcher_args("--redirects", "3"), "as one word"),
        (lambda: minimal().config({"model": object()}), "can be sent to nodes"),
        (lambda: minimal().config({1: 2}), "the keys must be texts"),
        (lambda: minimal().config([1, 2]), "give a mapping"),
        (lambda: minimal().config({"text": "x" * 200_000}), "longer than"),
        (lambda: minimal().environment({"A": 1}), "not a variable with its text"),
        (lambda: minimal().max_failures(-1), "max_failures: -1"),
        (lambda: minimal().train("train.py", "a\0b"), "train: a text with a NUL byte"),
        (lambda: minimal().train("a\0b.py"), "train: a text with a NUL byte"),
        (lambda: minimal().run_dir("/a\0b"), "run_dir: a text with a NUL byte"),
        (lambda: minimal().working_dir("/a\0b"), "working_dir: a text with a NUL byte"),
        (lambda: minimal().settings(node_check_command="a\0b"), "settings: a text with a NUL byte"),
        (lambda: minimal().environment({"A": "a\0b"}), "not a variable with its text"),
        (lambda: minimal().launcher_args("--tee=3\0"), "as one word"),
        (lambda: minimal().node_labels({"gpu": "a b"}), "not a Ray node label with its value"),
        (lambda: minimal().node_labels({"gpu": "!h100"}), "not a Ray node label with its value"),
        (lambda: minimal().node_labels({"gpu": "in(a"}), "not a Ray node label with its value"),
        (lambda: minimal().node_labels({"gpu": "in(a)"}), "not a Ray node label with its value"),
        (lambda: minimal().node_labels({1: "x"}), "not a Ray node label with its value"),
        (lambda: minimal().node_labels(None), "node_labels(None): give a mapping"),
        (lambda: minimal().environment(["x"]), "environment(['x']): give a mapping"),
        (lambda: minimal().environment({1: "x"}), "environment: 1: 'x' is not a variable"),
        (lambda: minimal().environment({"": "x"}), "environment: '': 'x' is not a variable"),
        (lambda: minimal().environment({"PET_STANDALONE": "1"}), "'PET_STANDALONE' is what the job tells each"),
        (lambda: minimal().environment({"PET_RDZV_ENDPOINT": "x:1"}), "what the job tells each launcher itself"),
        (lambda: minimal().launcher_args(5), "as one word"),
        (lambda: minimal().launcher_args("--nnode=2"), "what the job tells each launcher itself"),
        (lambda: minimal().launcher_args("--ft-run-dir=/x"), "what the job tells each launcher itself"),
        (lambda: minimal().launcher_args("--ft-param-node_group=x"), "what the job tells each launcher itself"),
        (lambda: minimal().launcher_args("--nonsense=7"), "not a flag of `resilience run`"),
        (lambda: minimal().launcher_args("--redirect=3"), "Did you mean '--redirects'"),
        (lambda: minimal().launcher_args("--help"), "not a flag of `resilience run`"),
        (lambda: minimal().launcher_args("--module"), "what the job tells each launcher itself"),
        (lambda: minimal().launcher_args("-m"), "as one word"),
        (lambda: minimal().launcher_args("--"), "not a flag of `resilience run`"),
        (lambda: minimal().launcher_args("--redirects="), "has none"),
        (lambda: minimal().settings(learn_after=math.inf), "a whole number from 1 to 900"),
        (lambda: minimal().settings(stop_grace=Decimal(60)), "settings(…): only numbers, texts"),
        (lambda: minimal().settings(termination_log=Path("/x")), "settings(…): only numbers, texts"),
        (lambda: minimal().rendezvous(nonsense=1), "no such setting"),
        (lambda: minimal().rendezvous(join_timout=1), "Did you mean 'join_timeout'"),
        (lambda: minimal().rendezvous(join_timeout=-1), "a number above 0"),
        (lambda: minimal().rendezvous(join_timeout="1,is_host=true"), "a number above 0"),
        (lambda: minimal().rendezvous(read_timeout=0.5), "a number above 0"),
        (lambda: minimal().run_dir(None), "run_dir(None): give the path of a folder"),
        (lambda: minimal().run_dir("s3://bucket/runs"), "that is a URL"),
        (lambda: minimal().train("train.py", ["--lr", 1]), "is no argument of a command line"),
        (lambda: minimal().train("train.py", None), "is no argument of a command line"),
        (lambda: minimal().working_dir(""), "working_dir(''): give the path of a folder"),
        (lambda: minimal().detached("no"), "detached: 'no' is neither"),
        (lambda: minimal().nodes(10**9), "can't be meant"),
        (lambda: minimal().nproc_per_node(10**9), "can't be meant"),
        (lambda: minimal().train("/"), "that is no script"),
        (lambda: minimal().train("--help/"), "that is no script"),
        (lambda: minimal().train("--help.py"), "that is no script"),
        (lambda: minimal().resources_per_node(**{"": 1}), "not the name of a resource"),
        (lambda: minimal().resources_per_node(object_store_memory=1_000_000), "object_store_memory is Ray's own"),
        (lambda: minimal().resources_per_node(bundle=1), "bundle is Ray's own"),
        (lambda: minimal().resources_per_node(**{"Größe": 1}), "'Größe' is no name of a resource"),
        (lambda: minimal().resources_per_node(**{"x" * 70_000: 1}), "at most 253 letters"),
        (lambda: minimal().resources_per_node(CPU=1e-9), "less than 0.0001, the least that Ray counts"),
        (lambda: minimal().resources_per_node(GPU=1.5), "GPU=1.5: Ray gives a part of one, or whole ones"),
        (lambda: minimal().settings({1: 2}), "settings: 1 is no name"),
        (lambda: minimal().rendezvous({None: None}), "rendezvous: None is no name"),
        (lambda: minimal().train("train.py", "\ud800"), "train: a text with a NUL byte or half a character"),
        (lambda: minimal().environment(A="\ud800"), "is not a variable with its text"),
        (lambda: minimal().environment(A="x" * 131_070), "environment: A is longer than the 131071 bytes"),
        (lambda: minimal().workload("a" * 64), "workload 'aaa"),
        (lambda: minimal().config({"a": {1: 2}}), "the keys must be texts, and 1 is not"),
        (lambda: minimal().config({"a": [{"b": {2: 3}}]}), "the keys must be texts, and 2 is not"),
        (lambda: minimal().settings(stop_grace=math.inf), "stop_grace=inf"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_built(build: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build().build()
    assert said in str(refusal.value)


def test_misspelt_call_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'nproc_per_node'"):
        JobBuilder().nproc_pernode(2)


def test_configuration_may_be_a_namespace_or_its_dict() -> None:
    args = argparse.Namespace(lr=0.1, name="x")
    assert minimal().config(args).build().spec.config == minimal().config(args.__dict__).build().spec.config
    assert minimal().config(args, lr=0.2).build().spec.config == {"lr": 0.2, "name": "x"}


def test_configuration_may_be_of_omegaconf_with_its_references() -> None:
    given = OmegaConf.create({"lr": 0.1, "again": "${lr}", "deep": {"list": [1, 2]}})
    assert minimal().config(given).build().spec.config == {"lr": 0.1, "again": 0.1, "deep": {"list": [1, 2]}}


def test_what_was_said_before_is_not_forgotten_when_more_is_said() -> None:
    one = (
        minimal().rendezvous(join_timeout=60).environment({"A": "1"}).node_labels({"gpu": "a"}).launcher_args("--tee=3")
    )
    both = one.rendezvous(last_call_timeout=5).environment({"B": "2", "A": "3"}).node_labels({"zone": "z"})
    spec = both.launcher_args("--redirects=3").settings(stop_grace=60).settings(network_check=True).build().spec
    assert spec.rendezvous == {"join_timeout": 60, "last_call_timeout": 5}
    assert spec.environment == {"A": "3", "B": "2"}
    assert spec.labels == {"gpu": "a", "zone": "z"}
    assert spec.launcher_args == ("--tee=3", "--redirects=3")
    assert spec.settings == {"stop_grace": 60, "network_check": True}


def test_launcher_is_told_everything_that_was_said() -> None:
    job = minimal().name("llm").nodes(4, minimum=3).nproc_per_node(8).workload("trainer").run_dir("/runs")
    job = job.settings(network_check=True, stop_grace=60, rank_heartbeat_timeout=None).rendezvous(last_call_timeout=5)
    spec = job.enable_node_group_failover("RACK_ID", 300).launcher_args("--redirects=3").build().spec
    post = launcher.Post(2, "ab" * 28, "10.0.0.7", 1, "rack-b")
    flags = launcher.flags(spec, post, "10.0.0.1:4000", "llm.1")
    assert set(flags) >= {
        "--nnodes=3:4",
        "--nproc-per-node=8",
        "--rdzv-endpoint=10.0.0.1:4000",
        "--rdzv-id=llm.1",
        "--rdzv-conf=is_host=false,last_call_timeout=5",
        "--local-addr=10.0.0.7",
        "--role=trainer",
        "--ft-node-name=abababababababab",
        "--ft-node-group=rack-b",
        "--ft-node-group-index=1",
        "--ft-run-dir=/runs/node-2",
        "--ft-network-check=true",
        "--ft-stop-grace=60",
        "--ft-rank-heartbeat-timeout=learned",
        "--redirects=3",
    }
    assert launcher.environment(spec, post)["GROUP_RANK"] == "2"


def test_flags_that_a_job_may_be_given_are_those_of_the_launcher() -> None:
    from torch.distributed.run import get_args_parser

    from resilience.launcher.cli import Parser, add_settings

    parser = Parser(parents=[get_args_parser()], conflict_handler="resolve")
    add_settings(parser)
    spelt = {
        flag[2:].replace("_", "-"): it.nargs for it in parser._actions for flag in it.option_strings if "--" in flag
    }
    own = {
        *words.PLACES,
        "help",
        *(f"{start}{name}".replace("_", "-") for start in ("ft-", "ft-param-") for name in words.OWN_SETTINGS),
    }
    assert {flag for flag, values in spelt.items() if values is None} - own == set(words.flags_with_values())
    assert {flag for flag, values in spelt.items() if values == 0} - own == set(words.SWITCHES)
    for flag in words.flags_with_values():
        words.check_flag(f"--{flag}=1")
    for flag in words.SWITCHES:
        words.check_flag(f"--{flag}")


def test_variables_of_torchrun_that_a_job_leaves_free_are_taken() -> None:
    assert minimal().environment({"PET_TEE": "3", "PET_ROLES": "x"}).build().spec.environment["PET_TEE"] == "3"


@pytest.mark.parametrize("page", ["README.md", "docs/ray.md"])
def test_program_of_the_pages_ends_with_the_code_of_a_job_that_failed(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(# submit\.py.*?)```", (Path(__file__).parents[3] / page).read_text(), re.DOTALL)
    assert found
    failed = status_of("llm", State(Phase.FAILED, reason="never", exit_code=77))
    monkeypatch.setattr(Job, "submit", lambda job: job)
    monkeypatch.setattr(Job, "wait", lambda _: failed)
    with pytest.raises(SystemExit) as end:
        exec(compile(found.group(1), page, "exec"), {})
    assert end.value.code == 77
    assert "job llm: FAILED, never" in capsys.readouterr().out


def test_launchers_parser_takes_every_flag() -> None:
    from torch.distributed.run import get_args_parser

    from resilience.launcher.cli import Parser, add_settings

    parser = Parser(parents=[get_args_parser()], conflict_handler="resolve")
    add_settings(parser)
    spec = minimal().train("train.py", "--lr", 0.1).nodes(2).enable_node_group_failover("RACK_ID", 300).build().spec
    post = launcher.Post(0, "ab" * 28, "127.0.0.1", 0, "rack-a")
    args = parser.parse_args([*launcher.flags(spec, post, "127.0.0.1:1", "x"), *launcher.target(spec)])
    assert (args.training_script, args.training_script_args, args.nnodes) == ("train.py", ["--lr", "0.1"], "2:2")


def test_describing_a_job_imports_no_ray() -> None:
    code = (
        "import sys; from resilience.integrations.ray import JobBuilder; JobBuilder().train('train.py').build()\n"
        "import resilience.integrations.ray.plan, resilience.integrations.ray.call, resilience.integrations.ray.node\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('ray', 'torch', 'omegaconf')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_without_ray_submitting_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nimport importlib.util; importlib.util.find_spec = lambda name: None\n"
        "from resilience.integrations.ray import JobBuilder\n"
        "try: JobBuilder().train('train.py').build().submit()\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'resilience-sdk[ray]'" in done.stdout


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import resilience.integrations.ray as package

    with pytest.raises(AttributeError, match="no attribute 'JobBilder'"):
        _ = package.JobBilder
    assert dir(package) == sorted(package.__all__)


def test_calls_that_take_names_and_values_take_them_either_way() -> None:
    one = minimal().resources_per_node(CPU=2).node_labels(gpu="h100").environment(A="1").settings(stop_grace=60)
    two = minimal().resources_per_node({"CPU": 2}).node_labels({"gpu": "h100"}).environment({"A": "1"})
    two = two.settings({"stop_grace": 60})
    first, second = one.name("llm").build().spec, two.name("llm").build().spec
    assert first == second


@pytest.mark.parametrize(
    ("say", "said"),
    [
        (
            lambda: minimal().settings(max_restarts=3).build(),
            "'max_restarts' is no setting. Say it by .max_restarts(…).",
        ),
        (lambda: minimal().settings(run_dir="x").build(), "Say it by .run_dir(…)."),
        (lambda: minimal().launcher_args("--max-restarts=3").build(), "Say it by .max_restarts(…)."),
        (lambda: minimal().launcher_args("--nnodes=3").build(), "Say it by .nodes(…)."),
        (lambda: minimal().nodes(2, minimum=0).build(), "nodes(…, minimum=…): 0 is not a whole number from 1 up"),
    ],
)
def test_what_has_a_call_of_its_own_is_refused_elsewhere_and_the_call_named(say: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        say()
    assert said in str(refused.value)


def test_builder_that_is_asked_for_what_a_job_does_says_to_build_it_first() -> None:
    with pytest.raises(AttributeError, match=r"has no 'submit': \.build\(\) returns the job"):
        minimal().submit()


@pytest.mark.parametrize("timeout", ["5", True, [1]])
@pytest.mark.parametrize("call", ["wait", "stop"])
def test_timeout_that_is_no_number_is_refused_before_a_cluster_is_looked_for(call: str, timeout: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"timeout={timeout!r}: give a number of seconds")):
        getattr(minimal().build(), call)(timeout)


@pytest.mark.parametrize("timeout", [math.nan, "60", True])
def test_time_to_wait_that_can_not_be_meant_is_refused_before_anything_is_asked(timeout: Any) -> None:
    job = minimal().build()
    for call in (job.wait, job.stop):
        with pytest.raises(TypeError, match="give a number of seconds, or None"):
            call(timeout)


def test_any_number_can_be_an_argument_of_a_script() -> None:
    assert minimal().train("train.py", "--lr", Decimal("0.5"), 3, Path("x")).build().spec.args == (
        "--lr",
        "0.5",
        "3",
        "x",
    )
