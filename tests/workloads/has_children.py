"""A rank with a child process that never ends by itself (in cycle 0)."""

import os
import subprocess
import sys
import time
from pathlib import Path

import resilience

rank, cycle = os.environ["RANK"], os.environ["RESILIENCE_CYCLE"]
resilience.heartbeat(0)
if cycle == "0":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with (Path(os.environ["PROGRESS"]) / f"rank_{rank}").open("a") as file:
        file.write(f"{cycle} child 0 {child.pid}\n{cycle} parent 0 {os.getpid()}\n")
    time.sleep(1000)
