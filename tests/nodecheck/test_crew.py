"""Real check processes: whatever a check does, the launcher gets words, in time, and nothing is left."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.errors import ConfigError
from resilience.nodecheck import crew as crew_module
from resilience.nodecheck.crew import Broken, Crew, Shape, fits, titles
from resilience.nodecheck.process import counted
from resilience.nodecheck.tasks import WrongResult
from tests.jobs import alive
from tests.nodecheck.patients import Odd

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parent.parent.parent
PATIENT = "tests.nodecheck.patients::Patient"


@contextmanager
def crew(accelerator: str, **env: str) -> Iterator[Crew]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    made = Crew(accelerator, {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env})
    try:
        made.load()
        yield made
    finally:
        made.close()


def test_one_process_does_all_tasks_one_after_the_other_and_ends(tmp_path: Path) -> None:
    with crew("cpu", GLOO_SOCKET_IFNAME="lo") as it:
        (answer,) = it.alone(str(tmp_path), 60)
        assert answer["seconds"] > 0
        assert answer["host"]["faults"] == []
        assert answer["host"]["figures"]["memory_free_mib"] > 0
        assert not list(tmp_path.iterdir())
        port = it.serve(60)
        (gathered,) = it.gather(("127.0.0.1", port), "a", first=0, world=1, timeout=60, give_up=str)
        assert gathered["seconds"] > 0
        (pid,) = it.pids()
        assert titles([answer]) == "cpu"
    assert not alive(pid)


@pytest.mark.parametrize(
    ("ailment", "words"),
    [
        ("wrong", "the product of the GEMM is wrong in 1 of 128 rows"),
        ("crashes", "ended with signal 11 (SIGSEGV)"),
        ("hangs", "did not end within 0.5 s"),
        pytest.param("flaky", "repetition 3 of the same GEMM differs in 1 of 16384", marks=pytest.mark.rare),
        pytest.param("raises", "RuntimeError: uncorrectable ECC error", marks=pytest.mark.rare),
    ],
)
def test_what_goes_wrong_is_told_in_words_and_its_process_is_ended(tmp_path: Path, ailment: str, words: str) -> None:
    with crew(PATIENT, AILMENT=ailment) as it:
        (pid,) = it.pids()
        with pytest.raises(Broken) as broken:
            it.alone(str(tmp_path), 0.5 if ailment == "hangs" else 60)
        assert words in str(broken.value)
        assert not alive(pid)
        assert it.pids() == []


def test_of_several_devices_the_broken_one_is_named_and_a_new_crew_can_be_had(tmp_path: Path) -> None:
    file = tmp_path / "ailment"
    file.write_text("second")
    with crew("tests.nodecheck.patients::TwoDevices", AILMENT_FILE=str(file), GLOO_SOCKET_IFNAME="lo") as it:
        assert it.devices == 2
        pids = it.pids()
        with pytest.raises(Broken, match=r"device 1: the GEMM: its process ended with signal 11"):
            it.alone(str(tmp_path), 60)
        assert not any(alive(pid) for pid in pids)
        file.write_text("")
        it.load()
        assert len(it.alone(str(tmp_path), 60)) == 2
        place = ("127.0.0.1", it.serve(60))
        assert len(it.gather(place, "b", first=0, world=2, timeout=60, give_up=str)) == 2


def test_collective_nobody_comes_to_is_given_up_as_soon_as_there_is_no_point(tmp_path: Path) -> None:
    with crew(PATIENT, GLOO_SOCKET_IFNAME="lo") as it:
        place, start = ("127.0.0.1", it.serve(60)), time.monotonic()
        with pytest.raises(Broken, match="the other one is gone"):
            it.gather(place, "c", first=0, world=2, timeout=60, give_up=lambda: "the other one is gone")
        assert time.monotonic() - start < 30
        assert it.pids() == []


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [
        ("tests.nodecheck.patients::Patent", "Did you mean 'Patient'?"),
        pytest.param("tests.nodecheck.nobody::Patient", "No module named", marks=pytest.mark.rare),
        ("ascend", "No module named 'torch_npu'. Install it, or name another accelerator. Nothing was started."),
        pytest.param("tests.nodecheck.patients::NotOne", "no subclass of", marks=pytest.mark.rare),
        pytest.param("tests.nodecheck.patients::NoBackend", "needs a type", marks=pytest.mark.rare),
    ],
)
def test_accelerator_that_can_not_be_meant_is_refused(accelerator: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused, crew(accelerator):
        pass
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("None", "count() says None; it must be a whole number from 0 to 1024"),
        ("'many'", "count() says 'many'"),
        ("float('nan')", "count() says nan"),
        ("[1]", "count() says [1]"),
        ("-1", "count() says -1"),
        ("100000", "count() says 100000"),
    ],
)
def test_number_of_devices_that_can_not_be_is_refused_in_words(
    said: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNT", said)
    with pytest.raises(WrongResult) as wrong:
        counted(Odd())
    assert words in str(wrong.value)


def test_node_with_a_nonsense_number_of_devices_is_broken() -> None:
    with (
        pytest.raises(Broken, match=r"loading the accelerator: count\(\) says None"),
        crew("tests.nodecheck.patients::Odd", COUNT="None"),
    ):
        pass


def test_process_that_dies_of_a_signal_without_a_name_is_told_of() -> None:
    with crew("tests.nodecheck.patients::Odd") as it:
        os.kill(it.pids()[0], 40)
        with pytest.raises(Broken, match="ended with signal 40"):
            it.serve(60)


def test_while_the_accelerator_loads_it_is_said_that_it_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("resilience"), "propagate", True)
    monkeypatch.setattr(crew_module, "REMIND_S", 0.0)
    caplog.set_level(logging.INFO, "resilience")
    with crew("cpu"):
        assert "the node check waits for loading the accelerator on this node, " in caplog.text


def test_what_a_device_is_called_is_one_harmless_line() -> None:
    name = titles([{"device": "an\x1b[2J odd\none \udcff"}, {"device": "an\x1b[2J odd\none \udcff"}])
    assert name == "2 × an?[2J odd one ?"
    name.encode()


def test_without_a_folder_for_temporary_files_the_check_is_broken_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(Broken, match="there is no place for its log"):
        Crew("cpu", {}).start()


def test_accelerator_that_crashes_while_it_loads_is_broken_and_not_refused() -> None:
    with (
        pytest.raises(Broken, match="loading the accelerator: its process ended with signal 11"),
        crew(PATIENT, AILMENT="does not load"),
    ):
        pass


@pytest.mark.parametrize(
    "says", ['{"accelerator": 3}', "[]", '{"accelerator": "a", "type": "b", "devices": "c", "pid": 1}']
)
def test_answer_of_another_shape_is_told_in_words(says: str) -> None:
    with (
        pytest.raises(Broken, match="loading the accelerator: it said"),
        crew("tests.nodecheck.patients::Talkative", SAYS=says),
    ):
        pass


def test_answers_are_taken_by_their_shape() -> None:
    shape: Shape = {"seconds": float, "host": {"faults": list}}
    assert fits({"seconds": 1, "host": {"faults": []}, "more": 1}, shape)
    assert not fits({"seconds": 1.0, "host": {"faults": "none"}}, shape)
    assert not fits({"seconds": 1.0, "host": []}, shape)
    assert not fits(None, shape)


def test_accelerator_that_ends_its_process_is_told_with_its_code(tmp_path: Path) -> None:
    with crew("tests.nodecheck.patients::Leaver") as it, pytest.raises(Broken, match=r"exit code 3; .*sys.exit\(3\)"):
        it.alone(str(tmp_path), 60)
