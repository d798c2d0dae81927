"""Starts a job of its own from inside a worker."""

import os
import subprocess
import sys
from pathlib import Path

import resilience

if len(sys.argv) > 1:
    resilience.heartbeat(7)
    sys.exit(0)
resilience.heartbeat(1)
inner = [sys.executable, "-m", "resilience.run", "--nproc-per-node=1", "--ft-run-dir=inner", __file__, "inner"]
subprocess.run(inner, check=True)
with (Path(os.environ["PROGRESS"]) / "rank_0").open("a") as file:
    file.write(f"0 outer 0 {os.getpid()}\n")
