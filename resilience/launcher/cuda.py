"""What is special about NVIDIA devices. NOT RUN ON A GPU: written from torch's and NVIDIA's documentation, tried with stand-ins.

1) ``variables``        before the workers start: flight recorder on, with dumps in the run's directory; compile caches that
                        survive restarts. What the user has set stays.
2) ``ask_for_dumps``    at a hang: every rank's NCCL watchdog writes its flight record
3) ``analyse``          torch's own analyser reads the records, in a process of its own with a deadline; its verdict is quoted
4) ``wait_until_free``  before the workers are started again: the driver may hold the memory of dead processes for seconds
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

_LOG = logging.getLogger("resilience.launcher")
_DRIVER = Path("/proc/driver/nvidia")
_BUFFER = "2000"  # collectives kept per rank: minutes of training, about a megabyte
_QUOTED = 2_000


def present() -> bool:
    """Whether there is an NVIDIA driver on this machine."""
    return _DRIVER.exists()


def variables(run_dir: Path, given: Mapping[str, str]) -> dict[str, str | None]:
    """Return what the workers should find in their environment, beside what the user has ``given``."""
    if not present():
        return {}
    flight = flight_folder(run_dir)
    with contextlib.suppress(OSError):  # no room for dumps is no reason not to train
        flight.mkdir(parents=True, exist_ok=True)
    wanted = {
        "TORCH_FR_BUFFER_SIZE": _BUFFER,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": _BUFFER,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(flight / "rank_"),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(flight / "pipe_"),
        "TORCHINDUCTOR_CACHE_DIR": str(run_dir / "cache" / "inductor"),
        "TRITON_CACHE_DIR": str(run_dir / "cache" / "triton"),
    }
    return {name: value for name, value in wanted.items() if name not in given}


def flight_folder(run_dir: Path) -> Path:
    """Return where the flight records of this node's ranks are written."""
    return run_dir / "flight" / os.uname().nodename


def ask_for_dumps(folder: Path, ranks: Iterable[int]) -> None:
    """Have the ranks write their flight records: torch reads from a named pipe per rank. Never waits for a reader."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # no reader: no NCCL group yet, or no flight recorder
            pipe = os.open(folder / f"pipe_{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1\n")
            finally:
                os.close(pipe)


def analyse(folder: Path, timeout: float, analyser: str | None = None) -> str:
    """Return what torch's analyser says about the flight records, or an empty string."""
    if not any(folder.glob("rank_*")):
        return ""
    tool = (
        analyser or shutil.which("torchfrtrace", path=str(Path(sys.executable).parent)) or shutil.which("torchfrtrace")
    )
    if tool is None:
        return ""
    command = [tool, str(folder), "--prefix", "rank_", "--allow-incomplete-ranks"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _LOG.warning("the flight records in %s could not be analysed: %s", folder, error)
        return ""
    return (done.stdout.strip() or done.stderr.strip())[-_QUOTED:]


def wait_until_free(pids: Iterable[int], timeout: float, smi: str | None = None) -> bool:
    """Wait until the driver holds no memory for processes that have ended; False when it still does after ``timeout``."""
    tool = smi or (shutil.which("nvidia-smi") if present() else None)
    ended = set(pids)
    if tool is None or not ended:
        return True
    deadline = time.monotonic() + timeout
    while True:
        held = _holders(tool, max(1.0, deadline - time.monotonic())) & ended
        if not held:
            return True
        if time.monotonic() >= deadline:
            _LOG.warning(
                "the driver still holds device memory for ended processes %s after %g s.", sorted(held), timeout
            )
            return False
        time.sleep(0.2)


def _holders(tool: str, timeout: float) -> set[int]:
    command = [tool, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {int(line) for line in done.stdout.split() if line.isdigit()}
