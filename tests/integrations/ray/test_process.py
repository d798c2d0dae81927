"""What an actor starts: one program at a time, which does not outlive the actor, and gets the signals that it should."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from resilience.integrations.ray import grace, store
from resilience.integrations.ray.node import NodeAgent
from resilience.integrations.ray.process import Keeper, Order
from resilience.integrations.ray.store import StoreKeeper

from tests.jobs import alive, wait_for

pytestmark = pytest.mark.spawns
SLEEPER = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


def order(number: int, notes: Path, stop: bool = False, code: str = SLEEPER) -> Order:
    return Order(number, (sys.executable, "-c", code, str(notes)), dict(os.environ), None, stop)


def pids(notes: Path, count: int) -> list[int]:
    def noted() -> list[int]:
        found = [int(line) for line in notes.read_text().split()] if notes.exists() else []
        return found if len(found) >= count else []

    return list(wait_for(noted, f"{count} programs to have started"))


def test_program_dies_with_the_process_that_keeps_it(tmp_path: Path) -> None:
    notes = tmp_path / "pids"
    code = (
        "import os, sys, time; from pathlib import Path; from tests.integrations.ray.test_process import order\n"
        "from resilience.integrations.ray.process import Keeper\n"
        "keeper = Keeper(); keeper.give(order(1, Path(sys.argv[1]))); time.sleep(600)"
    )
    actor = subprocess.Popen([sys.executable, "-c", code, str(notes)], cwd=Path(__file__).parents[3])
    try:
        (program,) = pids(notes, 1)
        assert alive(program)
        actor.kill()
        wait_for(lambda: not alive(program), "the program to die with its actor")
    finally:
        actor.kill()
        actor.wait()


def test_newer_order_ends_what_runs_and_an_older_one_changes_nothing(tmp_path: Path) -> None:
    notes = tmp_path / "pids"
    keeper = Keeper()
    keeper.give(order(2, notes))
    (first,) = pids(notes, 1)
    keeper.give(order(1, notes))
    keeper.give(order(2, notes))
    keeper.give(order(3, notes))
    _, second = pids(notes, 2)
    wait_for(lambda: not alive(first), "the first to be ended")
    assert keeper.look(-1, 0)[1:] == (3, None)
    keeper.end()
    wait_for(lambda: keeper.look(-1, 0)[2] is not None, "its end to be known")
    assert keeper.look(-1, 0)[1:] == (3, -signal.SIGKILL)
    assert not alive(second)


def test_wish_to_stop_is_one_sigterm_however_often_it_is_said(tmp_path: Path) -> None:
    notes = tmp_path / "pids"
    code = (
        "import os, signal, sys, time\ncount = [0]\n"
        "def heard(*_):\n    count[0] += 1\n    open(sys.argv[1] + '.heard', 'a').write('x')\n"
        "signal.signal(signal.SIGTERM, heard)\nopen(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n"
        "end = time.monotonic() + 60\nwhile not count[0] and time.monotonic() < end: time.sleep(0.01)\n"
        "time.sleep(0.5)\nsys.exit(79)"
    )
    keeper = Keeper()
    keeper.give(order(1, notes, code=code))
    pids(notes, 1)
    for _ in range(3):
        keeper.give(order(1, notes, stop=True, code=code))
    wait_for(lambda: keeper.look(-1, 0)[2] is not None, "its end")
    assert keeper.look(-1, 0)[1:] == (1, 79)
    assert (tmp_path / "pids.heard").read_text() == "x"


def test_signals_that_rays_workers_block_are_not_blocked_below_them(tmp_path: Path) -> None:
    notes = tmp_path / "pids"
    code = "import signal, sys; open(sys.argv[1], 'w').write(repr(sorted(signal.pthread_sigmask(0, ()))))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    try:
        keeper = Keeper()
        keeper.give(order(1, notes, code=code))
        wait_for(lambda: keeper.look(-1, 0)[2] is not None, "its end")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert notes.read_text() == "[]"


def test_folder_that_is_not_there_is_an_end_with_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keeper = Keeper()
    keeper.give(Order(1, (sys.executable, "-c", "pass"), dict(os.environ), str(tmp_path / "nowhere")))
    wait_for(lambda: keeper.look(-1, 0)[2] is not None, "its end")
    assert keeper.look(-1, 0)[1:] == (1, 2)
    assert "nowhere" in capfd.readouterr().err


def test_argument_that_no_program_can_have_is_an_end_with_2_and_the_next_order_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = Keeper()
    keeper.give(Order(1, (sys.executable, "-c", "a\0b"), dict(os.environ)))
    wait_for(lambda: keeper.look(-1, 0)[2] is not None, "its end")
    assert keeper.look(-1, 0)[1:] == (1, 2)
    assert "null byte" in keeper.why
    assert "null byte" in capfd.readouterr().err
    keeper.give(Order(2, (sys.executable, "-c", "pass"), dict(os.environ)))
    wait_for(lambda: keeper.look(-1, 0)[1:] == (2, 0), "the next one's end")
    assert keeper.why == ""


@pytest.mark.parametrize("code", ["EAGAIN", "ENOMEM", "EMFILE"])
def test_program_that_a_host_has_no_room_for_just_now_is_no_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: str
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(getattr(errno, code), "no room")

    keeper = Keeper()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_room)
        keeper.give(order(1, tmp_path / "pids"))
        wait_for(lambda: keeper.look(-1, 0)[2] is not None, "its end")
    assert keeper.look(-1, 0)[1:] == (1, os.EX_OSERR)
    assert "no room" in keeper.why
    assert "no room" in capfd.readouterr().err
    keeper.give(order(2, tmp_path / "pids", code="pass"))
    wait_for(lambda: keeper.look(-1, 0)[1:] == (2, 0), "the next one's end")


def test_end_of_a_program_that_somebody_else_has_asked_for_is_known_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(pid: int) -> int:
        keeper.end()
        assert keeper._process is not None
        keeper._process.wait()
        raise ProcessLookupError

    keeper = Keeper()
    monkeypatch.setattr(os, "pidfd_open", ended)
    keeper.give(order(1, tmp_path / "pids"))
    wait_for(lambda: keeper.look(-1, 0)[1:] == (1, -signal.SIGKILL), "its end", 10)


def test_end_of_a_program_is_known_though_its_actors_process_ignores_children(tmp_path: Path) -> None:
    keeper = Keeper()
    before = signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # as Ray's workers do, where it is told to end what they leave
    try:
        keeper.give(order(1, tmp_path / "pids", code="import sys; sys.exit(77)"))
        wait_for(lambda: keeper.look(-1, 0)[2] is not None, "its end")
        assert keeper.look(-1, 0)[1:] == (1, 77)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_keeper_that_stumbles_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resilience.integrations.ray.process._AFTER_A_STUMBLE_S", 0.01)
    real, failed = os.pidfd_open, [0]

    def no_more_files(pid: int) -> int:
        failed[0] += 1
        if failed[0] == 1:
            raise OSError(24, "Too many open files")
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", no_more_files)
    keeper = Keeper()
    keeper.give(order(1, tmp_path / "pids"))
    (program,) = pids(tmp_path / "pids", 1)
    assert alive(program)
    keeper.end()
    wait_for(lambda: keeper.look(-1, 0)[1:] == (1, -signal.SIGKILL), "its end")
    assert "Too many open files" in capfd.readouterr().err


def test_agent_runs_a_launcher_and_tells_its_exit_code(
    tmp_path: Path, agent: NodeAgent, new_agent: Callable[[], NodeAgent]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import resilience, os\nresilience.heartbeat(1)\nprint('rank', os.environ['RANK'], os.environ['WORD'])\n"
    )
    assert agent.report()["launch"] == 0
    version = agent.report()["version"]
    flags = ["--nproc-per-node=2", f"--ft-run-dir={tmp_path / 'run'}", str(script)]
    agent.order(7, flags, {"WORD": "told"}, str(tmp_path), False)
    said = wait_for(lambda: (it := agent.report(version, 5.0))["code"] is not None and it, "the launcher's end")
    assert (said["launch"], said["code"]) == (7, 0)
    assert new_agent().report()["life"] != said["life"]


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        (["nowhere.py"], 1, "it can't be run: FileNotFoundError: [Errno 2] No such file or directory: "),
        (["--module", "nowhere.at_all"], 1, "No module named 'nowhere'"),
        (["fails.py"], 1, "rank 0: ValueError: bad batch; reports and logs of that node: "),
        (["--ft-run-dir=/proc/nowhere", "fails.py"], 2, "the run's directory /proc/nowhere can't be made"),
        ([f"--ft-run-dir={'a' * 300}", "fails.py"], 2, "the run's directory /"),
    ],
)
def test_agent_tells_why_a_launcher_failed(
    tmp_path: Path, agent: NodeAgent, target: list[str], code: int, said: str
) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('bad batch')\n")
    variables = {"XDG_STATE_HOME": str(tmp_path / "state")}
    agent.order(1, ["--nproc-per-node=1", "--max-restarts=0", *target], variables, str(tmp_path), False)
    told = wait_for(lambda: (it := agent.report(-1, 0.0))["code"] is not None and it, "the launcher's end")
    assert told["code"] == code
    assert said in told["why"]
    assert agent.report()["why"] == told["why"]
    assert not agent._error_file.exists()


def test_variables_that_ray_was_started_with_do_not_change_what_the_launcher_is_told(
    tmp_path: Path, agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nopen('seen', 'w').write(' '.join(k for k in os.environ if k.startswith('PET_')))\n")
    for name in ("PET_NO_PYTHON", "PET_MODULE", "PET_STANDALONE", "PET_LOCAL_RANKS_FILTER"):
        monkeypatch.setenv(name, "0" if name == "PET_LOCAL_RANKS_FILTER" else "1")
    agent.order(1, ["--nproc-per-node=1", f"--ft-run-dir={tmp_path / 'run'}", str(script)], {}, str(tmp_path), False)
    told = wait_for(lambda: (it := agent.report(-1, 0.0))["code"] is not None and it, "the launcher's end")
    assert (told["code"], (tmp_path / "seen").read_text()) == (0, "PET_LOCAL_RANKS_FILTER")


@pytest.mark.parametrize("culprit", ['{"kind": "exit", "log": 5}', "[" * 100_000])
def test_agent_tells_a_launchers_end_though_its_reports_make_no_sense(
    tmp_path: Path, agent: NodeAgent, culprit: str
) -> None:
    path = tmp_path / "run" / "cycles" / "0.json"
    path.parent.mkdir(parents=True)
    path.write_text(f'{{"action": "stop", "culprit": {culprit}}}')
    os.utime(path, (2e9, 2e9))
    flags = [f"--ft-run-dir={tmp_path / 'run'}", "--ft-stop-grace=soon", "train.py"]
    agent.order(1, flags, {}, str(tmp_path), False)
    told = wait_for(lambda: (it := agent.report(-1, 0.0))["code"] is not None and it, "the launcher's end")
    assert told["code"] == 2
    assert told["why"].startswith("stop_grace='soon'"), "its error file is there to go by"


def test_agent_tells_a_launchers_end_though_what_it_left_can_not_be_read(
    tmp_path: Path, agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: object) -> str:
        raise TypeError("odd")

    monkeypatch.setattr("resilience.integrations.ray.cause.cause", odd)
    agent.order(1, ["--ft-stop-grace=soon", "train.py"], {}, str(tmp_path), False)
    told = wait_for(lambda: (it := agent.report(-1, 0.0))["code"] is not None and it, "the launcher's end")
    assert told["code"] == 2
    assert told["why"].startswith("why is not known: ")


def test_agent_tells_that_a_launchers_folder_is_not_there(tmp_path: Path, agent: NodeAgent) -> None:
    agent.order(1, ["train.py"], {}, str(tmp_path / "nowhere"), False)
    told = wait_for(lambda: (it := agent.report(-1, 0.0))["code"] is not None and it, "the launcher's end")
    assert (told["code"], str(tmp_path / "nowhere") in told["why"]) == (2, True)


def test_order_that_can_not_be_taken_is_told_as_the_end_of_its_launch_and_the_next_one_is_taken(
    tmp_path: Path, agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "ft.yaml")

    with monkeypatch.context() as patch:
        patch.setattr(grace, "of_launcher", broken)
        agent.order(1, ["nowhere.py"], {}, str(tmp_path), False)
    wait_for(lambda: agent.report()["code"] == 2, "its end")
    assert agent.report()["launch"] == 1
    assert "Permission denied: 'ft.yaml'" in agent.report()["why"]
    agent.order(2, [f"--ft-run-dir={tmp_path / 'run'}", "nowhere.py"], {}, str(tmp_path), False)
    wait_for(lambda: agent.report()["launch"] == 2, "the next launch")


def test_store_serves_and_its_end_is_told() -> None:
    keeper = StoreKeeper("127.0.0.1")
    endpoint = keeper.report(0.0)["endpoint"]
    assert endpoint.startswith("127.0.0.1:")
    from torch.distributed import TCPStore

    client = TCPStore("127.0.0.1", int(endpoint.split(":")[1]), is_master=False)
    client.set("key", "value")
    assert client.get("key") == b"value"
    del client
    keeper._keeper.end()
    said = wait_for(lambda: (it := keeper.report(1.0))["code"] is not None and it, "its end")
    assert said["code"] == -signal.SIGKILL


@pytest.mark.parametrize("says", ["", "print('serv', end='', flush=True); "])
def test_store_that_does_not_say_where_it_serves_is_ended_and_told_as_lost(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "READY_S", 1.5)
    keeper = StoreKeeper("127.0.0.1", ("-c", f"import time; {says}time.sleep(600)"))
    said = wait_for(lambda: (it := keeper.report(1.0))["code"] is not None and it, "its end")
    assert said == {"endpoint": "", "code": -signal.SIGKILL}
