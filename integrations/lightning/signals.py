"""SIGTERM while a trainer runs: the stop is agreed (see ``stop_requested``), and Lightning's own handler stands aside.

Lightning's answers the signal on the rank that got it, with a collective inside the handler: ranks that got none, or are elsewhere,
wait for each other. It also keeps a launcher from ending a rank that hangs. So what was there before it is put back for the time
of the training; under plain ``torchrun``, where ranks can't agree, Lightning's stays.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from resilience import config
from resilience.failover import exits
from resilience.pulse.client import listen_for_stop, stop_requested


class Stopped(SystemExit):
    """All ranks leave here, at the same step, because somebody wants the job to stop. The state is saved.

    A launcher of ours ends with exit code 79 then, and its ranks with 0; a process on its own says it itself.
    """

    def __init__(self, step: int) -> None:
        super().__init__(0 if config.rank_environment().socket is not None else exits.PREEMPTED)
        self.step = step

    def __str__(self) -> str:
        return f"the job was asked to stop, and did after step {self.step}"


class Signals:
    """Who answers SIGTERM."""

    def __init__(self) -> None:
        self.agreed = False
        self._before: Any = None

    def note(self) -> None:
        """Lightning has not registered its handler yet, and it is known who this rank is."""
        env = config.rank_environment()
        self.agreed = env.socket is not None or env.world < 2
        self._before = signal.getsignal(signal.SIGTERM)

    def take(self) -> Callable[[], bool]:
        """Lightning has: have ours answer, and what was there before. Return what says whether all ranks are to leave now; it is
        called once between two batches, on every rank."""
        before, self._before = self._before, None
        if self.agreed and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
            return listen_for_stop()
        return stop_requested if self.agreed else never


def never() -> bool:
    """Nobody asks."""
    return False
