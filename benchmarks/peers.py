"""Peers of the checkpoint benchmark that live in virtual environments of their own: ``BENCH_LIGHTNING`` and ``BENCH_DLROVER``.

DLRover needs a master beside its launcher, and leaves its shared memory behind: what carries our job's name is removed.
"""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from benchmarks.harness import ROOT, Event, Job

_HOMES = {"lightning": "BENCH_LIGHTNING", "dlrover": "BENCH_DLROVER"}
_WORDS = {"lightning": "Lightning AsyncCheckpointIO", "dlrover": "DLRover, memory"}
NAMES = tuple(f"{word}{which}" for word in _WORDS.values() for which in ("", ", first"))
_TIMEOUT_S = 180.0


def stalls(size: float, folder: Path) -> list[Event]:
    """Return the stalls of every peer that is installed."""
    found: list[Event] = []
    for who, variable in _HOMES.items():
        home = os.environ.get(variable)
        if home and (Path(home) / "bin" / "python").exists():
            told = _lightning(Path(home), size, folder) if who == "lightning" else _dlrover(Path(home), size, folder)
            found += [item | {"who": item["who"].replace(who, _WORDS[who])} for item in told]
    return found


def _env(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{os.environ.get('PATH', '')}"
    return {"OMP_NUM_THREADS": os.environ.get("BENCH_THREADS", "1"), "PATH": path, "PYTHONPATH": str(ROOT)}


def _script(who: str, size: float, folder: Path) -> list[str]:
    return ["-m", "benchmarks.workloads.peers", who, str(size), str(folder)]


def _lightning(home: Path, size: float, folder: Path) -> list[Event]:
    with Job([str(home / "bin" / "python"), *_script("lightning", size, folder)], _env(home)) as job:
        job.await_events("measured", 1, _TIMEOUT_S)
        return job.events("stall")


def _dlrover(home: Path, size: float, folder: Path) -> list[Event]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = f"bench{uuid.uuid4().hex[:8]}"
    python, launcher = str(home / "bin" / "python"), str(home / "bin" / "dlrover-run")
    master = f"--port {port} --node_num 1 --job_name {name} --platform local".split()
    place = {"ELASTIC_JOB_NAME": name, "DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "NODE_RANK": "0"}
    options = ["--nnodes=1", "--nproc_per_node=1"]
    try:
        with (
            Job([python, "-m", "dlrover.python.master.main", *master], _env(home)),
            Job([launcher, *options, *_script("dlrover", size, folder)], _env(home) | place) as job,
        ):
            job.await_events("measured", 1, _TIMEOUT_S)
            return job.events("stall")
    finally:
        for left in Path("/dev/shm").glob(f"{name}*"):
            left.unlink(missing_ok=True)
