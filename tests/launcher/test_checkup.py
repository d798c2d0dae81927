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
from typing import Any

import pytest

from resilience.errors import ConfigError
from resilience.failover.error_monitor import from_message
from resilience.launcher.checkup import StoreBoard, join, main
from tests.jobs import alive, children, free_port, wait_for

torch = pytest.importorskip("torch")
SILENCE_S = 1.0
ROOT = Path(__file__).parent.parent.parent
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "GLOO_SOCKET_IFNAME": "lo",
}
PATIENT = "--accelerator=tests.nodecheck.patients::Patient"


def nodecheck(*flags: str, ailment: str, log: Path = Path(os.devnull)) -> subprocess.Popen[bytes]:
    """Start the command, on a node with something, or nothing, wrong with it."""
    command = [sys.executable, "-m", "resilience", "nodecheck", PATIENT, *flags]
    with log.open("wb") as file:
        return subprocess.Popen(command, env={**ENV, "AILMENT": ailment}, stdout=file, stderr=subprocess.STDOUT)


def party(nodes: int) -> list[StoreBoard]:
    """Boards of nodes that came together in one store."""
    store: Any = torch.distributed.HashStore()
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
    ("flag", "words"), [("--nproc-per-node=-1", "at least 1"), ("--ft-straggler-factor=0.1", "greater than 1")]
)
def test_number_that_can_not_be_meant_is_refused(flag: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main([flag])


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
        command, env={**ENV, name: value}, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 80, done.stderr
    assert "the product of the GEMM is wrong" in done.stdout


@pytest.mark.spawns
def test_interrupt_ends_the_command_quietly_and_its_check_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with nodecheck(ailment="hangs", log=log) as node:
        try:
            (pid,) = wait_for(lambda: children(node.pid), "the check")
            node.send_signal(signal.SIGINT)
            code = node.wait(60)
        finally:
            node.kill()
    assert code == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert not alive(pid)


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
