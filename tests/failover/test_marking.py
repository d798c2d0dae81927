"""Marking faulty nodes: told once, marked once, tried again, never lost without a word, and never in the launcher's way."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from resilience.errors import ConfigError
from resilience.failover.error_monitor import ErrorMonitor, NodeFault, from_message, of_code
from resilience.failover.marking import FileMonitor, Marker, leave_message, load
from tests.jobs import wait_for

FAULT = NodeFault("gpu-07", "DriverError", "a worker ended with exit code 201: driver error", 201, "job", 12.5)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the file


def test_file_has_one_line_for_a_fault_however_often_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    for _ in range(3):
        FileMonitor(str(path)).mark(FAULT)
    other = dataclasses.replace(FAULT, node="gpu-08")
    FileMonitor(str(path)).mark(other)
    assert lines(path) == [dataclasses.asdict(FAULT), dataclasses.asdict(other)]


def test_torn_line_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    path.write_text('{"node": "gpu-0')
    FileMonitor(str(path)).mark(FAULT)
    FileMonitor(str(path)).mark(FAULT)
    assert [json.loads(line) for line in path.read_text().splitlines()[1:]] == [dataclasses.asdict(FAULT)]


def test_line_with_brackets_without_end_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    path.write_text("[" * 100_000 + "\n")
    FileMonitor(str(path)).mark(FAULT)
    assert json.loads(path.read_text().splitlines()[1]) == dataclasses.asdict(FAULT)


def test_launchers_that_share_a_file_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    faults = [dataclasses.replace(FAULT, node=f"gpu-{number}") for number in range(20)]
    threads = [threading.Thread(target=FileMonitor(str(path)).mark, args=(fault,)) for fault in faults]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {str(line["node"]) for line in lines(path)} == {fault.node for fault in faults}


# -- loading


def test_typo_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'file'"):
        load("fiel:/tmp/x")


@pytest.mark.parametrize("spec", ["file", "file:"])
def test_file_without_a_path_is_asked_for_it(spec: str) -> None:
    with pytest.raises(ConfigError, match="which file"):
        load(spec)


@pytest.mark.parametrize("is_there", [False, True])
def test_place_that_is_not_writable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda *words: False)  # nothing is refused to root
    if is_there:
        Path("faults").touch()
    with pytest.raises(ConfigError, match=f"can't be written: {'faults' if is_there else tmp_path} is not writable"):
        load("file:faults")


@pytest.mark.parametrize("where", ["/proc/x/y", "{folder}/file/y", "{folder}", "{folder}/tpyo/y"])
def test_file_that_can_not_be_is_refused_and_no_folder_made_for_it(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        load(f"file:{where.format(folder=tmp_path)}")
    assert [it.name for it in tmp_path.iterdir()] == ["file"]


def test_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "pager-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pager\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[resilience.error_monitors]\npager = pager:Pager\n")
    (tmp_path / "pager.py").write_text(
        "from resilience.failover.error_monitor import ErrorMonitor\n"
        "class Pager(ErrorMonitor):\n    def mark(self, fault): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(load("pager")).__name__ == "Pager"


class Unfinished(ErrorMonitor):
    """Forgot the one method."""


class Demanding(ErrorMonitor):
    """Wants to be told where."""

    def __init__(self, url: str) -> None: ...

    def mark(self, fault: NodeFault) -> None: ...


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tests.failover.test_marking::Unfinished", "does not define mark"),
        ("tests.failover.test_marking::Demanding", "made without arguments: missing a required argument: 'url'"),
        ("tests.failover.test_marking::Nobody", "has no attribute 'Nobody'"),
        ("tests.failover.test_marking::Unfinsihed", "Did you mean 'Unfinished'\\? Nothing was started"),
        ("tests.failover.nowhere::Nobody", "No module named"),
        ("tests.failover.test_marking::NodeFault", "does not derive from"),
    ],
)
def test_monitor_that_can_not_be_meant_is_refused(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(spec)


# -- the marker

MONITOR = """
import os, sys, time, json
from pathlib import Path
from resilience.failover.error_monitor import ErrorMonitor
HERE = Path(__file__).parent
class Fickle(ErrorMonitor):
    "Fails, hangs or dies as often as it is told, then marks."
    def __init__(self):
        if (HERE / "outage").exists():
            (HERE / "outage").unlink()
            raise ConnectionError("the service is away")
    def mark(self, fault):
        plan = (HERE / "plan").read_text().split()
        (HERE / "tries").open("a").write("x")
        step = plan[min(len((HERE / "tries").read_text()), len(plan)) - 1]
        if step == "fail":
            raise ConnectionError("the API server does not answer")
        if step == "die":
            os._exit(9)
        if step == "leave":
            os._exit(0)
        if step == "exit":
            sys.exit(0)
        if step == "loud":
            raise ConnectionError("no " * 10000)
        if step == "hang":
            (HERE / "pid").write_text(str(os.getpid()))
            time.sleep(1000)
        (HERE / "marked").write_text(json.dumps(fault.__dict__))
"""


@pytest.fixture
def fickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's monitor, in a folder that is importable."""
    (tmp_path / "fickle.py").write_text(MONITOR)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


@pytest.mark.spawns
@pytest.mark.parametrize("plan", ["mark", "fail die mark", "hang mark", "leave exit mark"])
def test_mark_that_fails_is_tried_again_and_telling_never_waits(fickle: Path, plan: str) -> None:
    (fickle / "plan").write_text(plan)
    marker = Marker("fickle::Fickle", timeout=3.0 if "hang" in plan else 30.0)
    marker.tell(FAULT)
    marker.tell(FAULT)
    wait_for((fickle / "marked").exists, "the mark")
    marker.close()
    assert json.loads((fickle / "marked").read_text()) == dataclasses.asdict(FAULT)
    assert len((fickle / "tries").read_text()) == len(plan.split())


@pytest.mark.spawns
def test_what_could_not_be_marked_is_said_at_the_end_with_what_to_do(
    fickle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("resilience"), "propagate", True)
    (fickle / "plan").write_text("hang")
    marker = Marker("fickle::Fickle", timeout=4.0)
    start = time.monotonic()
    marker.tell(FAULT)
    assert time.monotonic() - start < 2
    wait_for((fickle / "pid").exists, "the attempt")
    marker.close()
    assert "node gpu-07 is NOT marked as faulty (DriverError)" in caplog.text
    assert "its first attempt has not come to an end" in caplog.text or "it did not mark within 4 s" in caplog.text
    assert "Take it out of scheduling by hand" in caplog.text
    pid = int((fickle / "pid").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the attempt")


@pytest.mark.spawns
def test_what_a_monitor_says_at_great_length_is_cut(
    fickle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("resilience"), "propagate", True)
    (fickle / "plan").write_text("loud mark")
    marker = Marker("fickle::Fickle", timeout=30.0)
    marker.tell(FAULT)
    wait_for((fickle / "marked").exists, "the mark")
    marker.close()
    assert "could not be marked as faulty: ConnectionError: no no" in caplog.text
    assert max(map(len, caplog.messages)) < 2000


@pytest.mark.spawns
def test_wrong_monitor_is_found_before_anything_is_started(fickle: Path) -> None:
    with pytest.raises(ConfigError, match="has no attribute 'Fickel'"):
        Marker("fickle::Fickel", timeout=10.0)


@pytest.mark.spawns
def test_service_that_is_away_at_the_start_is_a_warning_and_marks_are_tried_later(
    fickle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("resilience"), "propagate", True)
    (fickle / "outage").touch()
    (fickle / "plan").write_text("mark")
    marker = Marker("fickle::Fickle", timeout=30.0)
    assert "ConnectionError: the service is away. Training goes on" in caplog.text
    marker.tell(FAULT)
    marker.close()
    assert (fickle / "marked").exists()


def test_nobody_is_told_where_nobody_is_configured() -> None:
    marker = Marker("none", timeout=0.1)
    marker.tell(FAULT)
    marker.close()


# -- the termination message


def test_termination_message_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    leave_message(FAULT, str(path))
    assert from_message(path.read_text()) == FAULT


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "folder"])
@pytest.mark.timeout(30)
def test_termination_message_in_a_folder_of_all_touches_nothing_that_others_put_there(shared: Path, kind: str) -> None:
    mine = shared.parent / "mine"
    mine.write_text("precious")
    path = shared / "7"
    if kind == "link":
        path.symlink_to(mine)
    elif kind == "dangling link":
        path.symlink_to(shared.parent / "new")
    elif kind == "hard link":
        path.hardlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    leave_message(FAULT, str(path))
    assert mine.read_text() == "precious"
    assert not (shared.parent / "new").exists()
    (found,) = shared.glob("7.*")
    assert from_message(found.read_text()) == FAULT
    assert found.stat().st_mode & 0o777 == 0o600


def test_termination_message_in_a_folder_of_all_is_not_written_to_another_users_file(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, us = shared / "7", os.geteuid()
    path.write_text("theirs")
    if us == 0:
        os.chown(path, 65534, -1)
    else:  # nobody else's file can be made: then it is us who are somebody else
        monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    leave_message(FAULT, str(path))
    assert path.read_text() == "theirs"
    (found,) = shared.glob("7.*")
    assert from_message(found.read_text()) == FAULT


@pytest.mark.timeout(30)
def test_pipe_in_place_of_the_termination_log_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "log")
    monkeypatch.setattr(logging.getLogger("resilience"), "propagate", True)
    with caplog.at_level(logging.ERROR):
        leave_message(FAULT, str(tmp_path / "log"))
    assert "could not be written" in caplog.text


def test_plain_file_of_ours_is_written_in_place_wherever_it_is(shared: Path) -> None:
    for path in (shared / "log", shared.parent / "log"):
        path.write_text("x" * 10000)
        number = path.stat().st_ino
        leave_message(FAULT, str(path))
        assert from_message(path.read_text()) == FAULT
        assert path.stat().st_ino == number, "a container's is a mount: nothing can take its place"


def test_without_kubernetes_nothing_is_written() -> None:
    if Path("/dev/termination-log").exists():
        pytest.skip("this is a container of Kubernetes: left out is what happens elsewhere")
    leave_message(FAULT, None)
    assert not Path("/dev/termination-log").exists()


@pytest.mark.parametrize("letter", ["x", "ü", "\U0001f525", '"'])
def test_message_is_kept_whole_by_kubernetes_and_readable(letter: str) -> None:
    fault = dataclasses.replace(FAULT, message=letter * 5000)
    text = fault.as_message()
    assert len(text.encode()) <= 4096
    found = from_message(text)
    assert found is not None
    assert found.message
    assert fault.message.startswith(found.message)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "Killed", '{"resilience": 1}', '{"resilience": 1, "fault": {"node": 3}}', "[" * 4000],
    ids=lambda text: text[:40],
)
def test_what_others_leave_there_is_no_fault(text: str) -> None:
    assert from_message(text) is None


def told(**fields: object) -> NodeFault | None:
    return from_message(json.dumps({"resilience": 1, "fault": {**dataclasses.asdict(FAULT), **fields}}))


@pytest.mark.parametrize("at", [1e300, -1e300, -1.0, float("nan"), float("inf"), 10**400], ids=lambda at: str(at)[:8])
def test_time_that_can_not_be_is_unknown_and_the_fault_is_heard(at: float) -> None:
    assert told(at=at) == dataclasses.replace(FAULT, at=0.0)


def test_texts_are_one_line_of_bounded_length_whatever_is_in_them() -> None:
    forged = "a\n2030-01-01 ERROR b\r\x1b[2Jc\x9b1m\u2028d\u202ee\ud800f" + "x" * 4000
    found = told(reason=forged, message=forged, run=forged, node=forged)
    assert found is not None
    for text in (found.reason, found.message, found.run, found.node):
        assert text.isprintable()
        assert text.startswith("a 2030-01-01 ERROR b  [2Jc 1m d e fx")
        assert len(text) <= 2000
    assert told(message="\x1b") is None


@pytest.mark.parametrize(("code", "reason"), [(14, "InfoROMCorrupted"), (128, "UnknownDevice"), (201, "DriverError")])
def test_codes_of_the_hardware_are_faults_and_others_are_not(code: int, reason: str) -> None:
    fault = of_code("gpu-07", code)
    assert fault is not None
    assert (fault.reason, fault.code) == (reason, code)
    assert of_code("gpu-07", 1) is None


@pytest.mark.spawns
def test_monitor_that_leaves_something_in_the_background_has_marked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the monitor's stderr, and keeps it open."""
    (tmp_path / "loose.py").write_text(
        "import pathlib, subprocess\n"
        "from resilience.failover.error_monitor import ErrorMonitor\n"
        "class Loose(ErrorMonitor):\n"
        "    def mark(self, fault):\n"
        f"        with open({str(tmp_path / 'marked')!r}, 'a') as file:\n"
        "            file.write(fault.node + '\\n')\n"
        "        left = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"        pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(left.pid))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    caplog.set_level(logging.INFO)
    marker = Marker("loose::Loose", 20.0)
    try:
        marker.tell(FAULT)
        wait_for(lambda: "is marked as faulty" in caplog.text, "the mark", 15)
        marker.close()
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert (tmp_path / "marked").read_text() == "gpu-07\n"
    assert "NOT marked" not in caplog.text


def test_monitor_that_fails_only_when_it_leaves_has_marked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "leaves_badly.py").write_text(
        "from resilience.failover.error_monitor import ErrorMonitor\n"
        "class Mine(ErrorMonitor):\n"
        "    def mark(self, fault):\n"
        f"        open({str(tmp_path / 'marks')!r}, 'a').write(fault.node + chr(10))\n"
        "    def close(self):\n"
        "        raise OSError('the connection is gone')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    marker = Marker("leaves_badly::Mine", 30.0)
    marker.tell(FAULT)
    wait_for(lambda: "is marked as faulty" in caplog.text, "the mark")
    marker.close()
    assert (tmp_path / "marks").read_text() == "gpu-07\n"
    assert "NOT marked" not in caplog.text
    (warning,) = [
        record for record in caplog.records if record.levelno == logging.WARNING and "close()" in record.message
    ]
    assert "OSError: the connection is gone" in warning.message
