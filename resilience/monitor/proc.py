"""What the kernel says about a process: its state, when it started, what it catches, who is in its session.

Hazard: a pid is only a name while its process lives. Everything that signals by pid checks the start time first, or holds
a pidfd.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessState:
    """A line of /proc/PID/stat, as far as we need it."""

    state: str  # R running, S sleeping, D uninterruptible, T stopped, t traced, Z zombie
    group: int
    session: int
    started_ticks: int


def state_of(pid: int) -> ProcessState | None:
    """Return the state of a process, or ``None`` when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessState(fields[0].decode(), int(fields[2]), int(fields[3]), int(fields[19]))


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for a signal. Sending a real-time signal to one that has none would end it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    except OSError:
        pass
    return False


def kernel_stack(pid: int) -> str:
    """Return where the process is in the kernel, as far as this user may see it."""
    lines = []
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            text = file.read().decode("utf-8", "replace").strip()
            if text and text != "0":
                lines.append(f"{name}: {text}")
    return "\n".join(lines)


def session_members(session: int) -> list[int]:
    """Return the pids of all live processes of a session."""
    members = []
    try:
        entries = os.listdir("/proc")  # noqa: PTH208 - monitors import no pathlib
    except OSError:  # no descriptor left for it
        return []
    for entry in entries:
        if entry.isdigit():
            state = state_of(int(entry))
            if state is not None and state.session == session and state.state != "Z":
                members.append(int(entry))
    return members


def signal_group(pid: int, started_ticks: int, signum: int) -> None:
    """Signal the process group that ``pid`` leads, unless the pid was given to a stranger in the meantime."""
    state = state_of(pid)
    if state is not None and state.started_ticks != started_ticks:
        return
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)


def sweep_session(pid: int, started_ticks: int) -> None:
    """End what a dead rank left behind in its session (DataLoader workers, helpers that hold a device)."""
    state = state_of(pid)
    if state is not None and state.started_ticks != started_ticks:
        return
    for member in session_members(pid):
        if member != pid:
            with contextlib.suppress(OSError):
                os.kill(member, signal.SIGKILL)
