"""Whether a training is complete, and the file that says so to whoever would start the next job.

The file is named by ``FAULT_TOL_FINISHED_FLAG_FILE``, as users of NVRx know it: a chain of jobs that resume each other ends when it
is there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilience import config

_LOG = logging.getLogger("resilience")


@dataclass(frozen=True)
class End:
    """How a training ended that ended by itself."""

    step: int
    max_steps: int
    epoch: int
    max_epochs: int | None
    stopped: bool  # a callback set ``should_stop``
    out_of_time: bool  # ``max_time`` was up

    @classmethod
    def of(cls, trainer: Any) -> End:
        """Look at a trainer."""
        timers = [one for one in trainer.callbacks if type(one).__name__ == "Timer"]
        late = any((left := one.time_remaining()) is not None and left <= 0 for one in timers)
        limit = trainer.max_epochs
        return cls(trainer.global_step, trainer.max_steps, trainer.current_epoch, limit, trainer.should_stop, late)


def is_complete(end: End) -> bool:
    """Whether there is nothing left to train."""
    if 0 <= end.max_steps <= end.step:
        return True
    if end.max_epochs is not None and 0 <= end.max_epochs <= end.epoch:
        return True
    return end.stopped and not end.out_of_time


def leave_mark() -> None:
    """Make the file, if the environment names one."""
    path = config.finished_flag_file()
    if path is not None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()
        except OSError as error:  # the training itself is complete
            _LOG.error("training is complete, and %s, which is to say so, can't be made: %s", path, error)
