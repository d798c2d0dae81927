"""``resilience nodecheck``: nodes that only a store connects know of each other's end, and flags that can't be meant."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilience.errors import ConfigError
from resilience.failover.error_monitor import from_message
from resilience.launcher.boards import StoreBoard, TimedStore, join
from resilience.launcher.checkup import main
from resilience.nodecheck.exchange import Interrupted
from tests.jobs import alive, children, held_in_import, stopped, wait_for
from tests.ports import free_port

torch = pytest.importorskip("torch")
SILENCE_S = 1.0
ROOT = Path(__file__).parent.parent.parent
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "GLOO_SOCKET_IFNAME": "lo",
}
PATIENT = "--accelerator=tests.nodecheck.patients::Patient"


def nodecheck(*flags: str, ailment: str, log: Path = Path(os.devnull), **more: str) -> subprocess.Popen[bytes]:
    """Start the command, on a node with something, or nothing, wrong with it."""
    env = {**ENV, "AILMENT": ailment, **more}
    command = [sys.executable, "-m", "resilience", "nodecheck", PATIENT, *flags]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def party(nodes: int) -> list[StoreBoard]:
    """Boards of nodes that came together in one store."""
    store = TimedStore(torch.distributed.HashStore())
    with ThreadPoolExecutor(nodes) as pool:
        joining = [pool.submit(join, store, me, f"host-{me}", nodes, SILENCE_S) for me in range(nodes)]
        found = [it.result() for it in joining]
    assert all(names == tuple(f"host-{me}" for me in range(nodes)) for _, names in found)
    return [board for board, _ in found]


def test_node_that_goes_is_lost_to_all_others_and_those_that_stay_are_not() -> None:
    boards = party(3)
    try:
        boards[1].close()
        for me in (0, 2):
            wait_for(boards[me].lost_nodes, "the silence to be noticed")
            assert boards[me].lost_nodes() == {1: "host-1 has been silent for 1 s"}
    finally:
        for board in boards:
            board.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nproc-per-node=-1", "at least 1"),
        ("--ft-straggler-factor=0.1", "greater than 1"),
        *((f"--nnodes={word}", "give a number from 1 on, or MIN:MAX") for word in ("0", "-1", "x", "3:2", ":", "1:x")),
        ("--nnodes=2 --rdzv-endpoint=127.0.0.1:99999", "port"),
        ("--rdzv-endpoint=localhost:29477", "--nnodes=N, the same on all nodes"),
        *(
            (f"--nnodes=2 --rdzv-endpoint=127.0.0.1:1 --rdzv-conf={conf}", "rdzv-conf")
            for conf in ("join_timeout=abc", "join_timeout", "join_timeout=-5", "is_host=perhaps", "=3")
        ),
    ],
)
def test_flag_that_can_not_be_meant_is_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main(flags.split())


def test_help_lists_the_settings_that_matter_here_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--ft-error-monitor" in shown
    assert "--exclude-straggler" in shown
    assert "--ft-rank-heartbeat-timeout" not in shown
    with pytest.raises(SystemExit) as caught:
        main(["--ft-rank-heartbeat-timeout=5"])
    assert caught.value.code == 2
    assert "--ft-rank-heartbeat-timeout" in capsys.readouterr().err


def test_monitor_that_can_not_be_meant_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'file'"):
        main(["--ft-error-monitor=fil:x"])


@pytest.mark.spawns
def test_faulty_node_is_told_to_the_monitor_and_left_in_the_message_that_are_named(tmp_path: Path) -> None:
    faults, message, log = tmp_path / "faults", tmp_path / "message", tmp_path / "log"
    flags = [f"--ft-error-monitor=file:{faults}", f"--ft-termination-log={message}", "--ft-node-name=gpu-7"]
    with nodecheck(*flags, ailment="wrong", log=log) as node:
        try:
            assert node.wait(60) == 80, log.read_text()
        finally:
            node.kill()
    (told,) = map(json.loads, faults.read_text().splitlines())
    assert (told["node"], told["reason"]) == ("gpu-7", "NodeCheckFailed")
    left = from_message(message.read_text())
    assert left is not None
    assert left.message == told["message"]
    assert "is marked as faulty" in log.read_text()


@pytest.mark.spawns
def test_ill_node_of_the_page_is_found_faulty(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "nodecheck.md").read_text(encoding="utf-8")
    code = next(it for it in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "# sick.py" in it)
    (line,) = [it for it in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "sick::Sick" in it]
    (tmp_path / "sick.py").write_text(code)
    variable, _, *flags = shlex.split(line)
    name, _, value = variable.partition("=")
    command = [sys.executable, "-m", "resilience", *flags]
    done = subprocess.run(
        command, env={**ENV, name: value}, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 80, done.stderr
    assert "the product of the GEMM is wrong" in done.stdout


@pytest.mark.spawns
def test_interrupt_ends_the_command_quietly_and_its_check_with_it(tmp_path: Path) -> None:
    log, hanging = tmp_path / "log", tmp_path / "hanging"
    with nodecheck(ailment="hangs", log=log, HANGING=str(hanging)) as node:
        try:
            wait_for(hanging.exists, "the check to hang")
            (pid,) = children(node.pid)
            node.send_signal(signal.SIGINT)
            code = node.wait(60)
        finally:
            node.kill()
    assert code == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert not alive(pid)


@pytest.mark.spawns
def test_interrupt_in_the_imports_ends_the_command_and_its_check() -> None:
    with held_in_import(
        [sys.executable, "-m", "resilience", "nodecheck", "--accelerator=cpu"], "libtorch_python"
    ) as node:
        (check,) = children(node.pid)
        checks = [check, *children(check)]
        node.send_signal(signal.SIGINT)
    _, told = node.communicate(timeout=150)
    assert (node.returncode, told) == (-signal.SIGINT, "")
    wait_for(lambda: not any(map(alive, checks)), "the check to end")


@pytest.mark.long
@pytest.mark.spawns
def test_node_that_is_killed_during_the_check_costs_the_other_its_silence_and_no_more(tmp_path: Path) -> None:
    flags = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    log, silence = tmp_path / "log", "--ft-node-silence-timeout=3"
    with (
        nodecheck(*flags, silence, "--rdzv-conf=is_host=1", "--ft-node-name=stays", ailment="", log=log) as stays,
        nodecheck(*flags, silence, "--rdzv-conf=is_host=0", "--ft-node-name=goes", ailment="hangs") as goes,
    ):
        try:
            wait_for(lambda: "2 nodes have come together" in log.read_text(), "the nodes to come together")
            goes.kill()
            code = stays.wait(60)
        finally:
            stays.kill()
            goes.kill()
    said = log.read_text()
    assert "goes has been silent for 3 s" in said or "vanished" in said, said
    assert code in (0, 75), said


def pair(*flags: str) -> list[str]:
    """The flags of two nodes on this host; the first serves the store."""
    return ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1", *flags]


@pytest.mark.spawns
def test_node_ends_when_the_store_it_checks_in_stands_still_and_nothing_of_its_check_is_left(tmp_path: Path) -> None:
    flags, log = pair("--ft-store-silence-timeout=2"), tmp_path / "log"
    with (
        nodecheck(*flags, "--rdzv-conf=is_host=1", ailment="hangs") as serves,
        nodecheck(*flags, "--rdzv-conf=is_host=0", ailment="hangs", log=log) as node,
    ):
        try:
            wait_for(lambda: "2 nodes have come together" in log.read_text(), "the nodes to come together")
            (check,) = children(node.pid)
            with stopped(serves.pid):
                code = node.wait(60)
        finally:
            serves.kill()
            node.kill()
    said = log.read_text()
    assert code == 75, said
    assert "has not answered for 2 s" in said
    assert "Traceback" not in said
    assert not alive(check)


@pytest.mark.spawns
def test_node_that_is_killed_before_its_first_word_is_named(tmp_path: Path) -> None:
    flags, log = pair("--ft-node-silence-timeout=2"), tmp_path / "log"
    dies = "import os, signal, sys\nfrom resilience.launcher import checkup\n"
    dies += "checkup.join = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\ncheckup.main(sys.argv[1:])\n"
    victim = [sys.executable, "-c", dies, PATIENT, *flags, "--rdzv-conf=is_host=0", "--ft-node-name=goes"]
    with nodecheck(*flags, "--rdzv-conf=is_host=1", ailment="", log=log) as stays:
        try:
            gone = subprocess.run(victim, env=ENV, stderr=subprocess.DEVNULL, timeout=150, check=False)
            assert gone.returncode == -signal.SIGKILL
            code = stays.wait(60)
        finally:
            stays.kill()
    said = log.read_text()
    assert code == 75, said
    assert "(goes) came and said no word within 2 s" in said
    assert "Traceback" not in said


def test_of_many_mute_nodes_the_first_are_named() -> None:
    store = TimedStore(torch.distributed.HashStore())
    with pytest.raises(Interrupted, match=r"node 1 \(a\), node 2 \(without a name\), .* and 2 more came"):
        join(store, 0, "host-0", 11, 0.1, known={1: "a"})


@pytest.mark.long
@pytest.mark.spawns
def test_store_that_ends_during_the_check_is_said_in_words_and_not_in_frames_of_cpp(tmp_path: Path) -> None:
    flags, log = pair(), tmp_path / "log"
    with (
        nodecheck(*flags, "--rdzv-conf=is_host=1", ailment="hangs") as serves,
        nodecheck(*flags, "--rdzv-conf=is_host=0", ailment="", log=log) as node,
    ):
        try:
            wait_for(lambda: "2 nodes have come together" in log.read_text(), "the nodes to come together")
            serves.kill()
            code = node.wait(90)
        finally:
            serves.kill()
            node.kill()
    said = log.read_text()
    assert code == 75, said
    assert f"the store at {flags[1].partition('=')[2]} is gone" in said
    assert "frame #" not in said
