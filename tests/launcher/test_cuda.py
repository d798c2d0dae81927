"""What is written for NVIDIA devices, tried with stand-ins: none of it has run on a GPU."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from resilience.launcher import cuda


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_driver_nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_DRIVER", tmp_path / "nowhere")
    assert cuda.variables(tmp_path, {}) == {}
    assert cuda.wait_until_free([1], 1.0)


def test_flight_recorder_is_on_with_its_dumps_in_the_run_and_what_the_user_set_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_DRIVER", tmp_path)
    found = cuda.variables(tmp_path, {"TRITON_CACHE_DIR": "/mine"})
    assert int(found["TORCH_FR_BUFFER_SIZE"] or 0) > 0
    assert str(found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]).startswith(str(tmp_path))
    assert cuda.flight_folder(tmp_path).is_dir()
    assert "TRITON_CACHE_DIR" not in found
    assert "TORCHINDUCTOR_CACHE_DIR" in found


def test_dump_is_asked_for_through_the_pipe_and_a_rank_without_one_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe_1.pipe")
    reader = os.open(tmp_path / "pipe_1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        cuda.ask_for_dumps(tmp_path, [0, 1])
        assert os.read(reader, 16) == b"1\n"
    finally:
        os.close(reader)
    cuda.ask_for_dumps(tmp_path, [1])  # nobody reads: it must not block


@pytest.mark.spawns
def test_analyser_is_quoted_and_one_that_hangs_or_is_missing_does_no_harm(tmp_path: Path) -> None:
    assert cuda.analyse(tmp_path, 5.0) == "", "no records"
    (tmp_path / "rank_0").write_bytes(b"")
    good = program(tmp_path, "good", 'echo "rank 3 did not join all_reduce 17 ($2 $3)"')
    assert cuda.analyse(tmp_path, 30.0, good) == "rank 3 did not join all_reduce 17 (--prefix rank_)"
    assert cuda.analyse(tmp_path, 0.2, program(tmp_path, "hangs", "exec sleep 1000")) == ""
    assert cuda.analyse(tmp_path, 5.0, str(tmp_path / "missing")) == ""


@pytest.mark.spawns
def test_memory_of_ended_processes_is_waited_for_with_a_deadline(tmp_path: Path) -> None:
    counter = tmp_path / "asked"
    freed = program(tmp_path, "freed", f'echo x >> {counter}; [ "$(wc -l < {counter})" -ge 3 ] || echo 4711; echo 99')
    assert cuda.wait_until_free([4711, 12], 30.0, freed)
    assert len(counter.read_text().split()) == 3
    assert not cuda.wait_until_free([99], 0.3, freed)
    assert cuda.wait_until_free([], 30.0, freed)
