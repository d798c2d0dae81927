"""The snapshots of a training: one flash checkpoint of everything that a trainer trains with.

1) (on_fit_start)         ``open``: memory is taken, and the newest snapshot that all ranks have is restored, or none
2) (between two batches)  ``arrive``, the first time: loops, data and random numbers go to where they were
3) (between two batches)  ``take``: a snapshot, if one is due
4) (on_train_end)         ``finish``: the last one, with training at its end
5) (teardown)             ``close``: waits until it is on disk; after an exception ``leave``, which waits for nobody

Steps are optimizer steps, as ``trainer.global_step`` counts them: the snapshot of step N is that after N + 1 of them. While
gradients are accumulated there is none, since they are no part of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilience.integrations.lightning.metrics import Metrics
from resilience.integrations.lightning.position import Position
from resilience.integrations.lightning.progress import Progress, begins_with_hooks

from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.receipt import Receipt
from resilience.checkpoint.state import Random, Stateful

_LOG = logging.getLogger("resilience.lightning")
_PATIENCE_S = 20.0  # for a slot, of the last snapshot before an agreed stop


class Due:
    """Whether an interval is over, where it is counted in steps; by the clock the checkpoint itself knows."""

    def __init__(self, every: Any) -> None:
        self.steps = every if isinstance(every, int) and not isinstance(every, bool) else 0

    def since(self, last: int, now: int) -> bool:
        """Whether so many steps were completed between two numbers of steps. One batch may make several, or none."""
        return self.steps > 0 and now // self.steps > last // self.steps

    def after(self, now: int) -> float:
        """Return the number of steps at which the interval is over next."""
        return (now // self.steps + 1) * self.steps if self.steps > 0 else math.inf


class _Place:
    """What is each rank's own: its place in the data, and the random numbers that the first epoch was made from."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self.fetcher: Any = None
        self.start: Any = None
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        found = None if self.fetcher is None else self.position.state_dict(self.fetcher)
        return {"start": self.start, "position": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Snapshots:
    """What a callback does with them."""

    def __init__(
        self,
        directory: str | Path,
        *,
        memory_every: Any,
        disk_every: Any,
        allow_other_world: bool,
        strict: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._directory = directory
        self._memory, self._disk = Due(memory_every), Due(disk_every)
        self._every = {
            "memory_every": 1 if self._memory.steps else memory_every,
            "disk_every": None if self._disk.steps else disk_every,
        }
        self._wish = {"allow_other_world": allow_other_world, "strict": strict}
        self._options = dict(options)
        self.due = 0.0  # no snapshot before so many
        self._arrived = -1  # so many batches were drawn when training was where it was, or at its beginning
        self._random: Any = None  # to be set at the first batch
        self.resumed = False

    # -- coming -----------------------------------------------------------------------------------------------------

    def open(self, trainer: Any) -> int:
        """Take the memory and restore; return how many optimizer steps are done."""
        self._trainer = trainer
        self._progress, self._metrics = Progress(trainer), Metrics(trainer)
        self.position = Position()
        self._place = _Place(self.position)
        self.checkpoint = FlashCheckpoint(self._directory, **{**self._every, **self._options}, **self._things())
        for part in self.checkpoint.parts:
            if isinstance(part, Stateful) and part.name == "trainer":
                part.any_world = True  # and yet each rank has its own: what callbacks know need not be the same
        self._place.start = Random().state()
        try:
            return self.restore()
        except BaseException as error:
            self.leave(error)
            raise

    def restore(self) -> int:
        """Go back to the newest snapshot, if there is one; return how many optimizer steps are done."""
        self.due = 0.0
        done: int = self.checkpoint.restore(allow_fresh_start=True, **self._wish)
        self.resumed = self._place.loaded is not None
        if self._place.loaded is not None:
            self._random, self._place.start = Random().state(), self._place.loaded["start"]
            _set_random(self._place.start)  # so that the order of the first epoch is what it was
        return done

    def _things(self) -> dict[str, Any]:
        trainer = self._trainer
        things: dict[str, Any] = {"model": trainer.strategy.model}
        things |= {_numbered("optimizer", number): one for number, one in enumerate(trainer.optimizers)}
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        things |= {_numbered("scheduler", number): one for number, one in enumerate(schedules)}
        return {**things, "trainer": self._progress, "loader": self._place, "resilience.metrics": self._metrics}

    def arrive(self, fetcher: Any) -> None:
        """The first batch is about to be fetched: bring everything that counts to where it was."""
        if self.resumed:
            self._go_on(fetcher)
        self._arrived = self.position.drawn

    def _go_on(self, fetcher: Any) -> None:
        if not self._progress.over and begins_with_hooks(self._trainer):
            self._undo()
        loaded, self._place.loaded = self._place.loaded, None
        if not self._progress.over and loaded is not None:
            self._progress.count()
            self.position.arrive(fetcher, self._trainer.fit_loop.epoch_loop.batch_progress.current.completed)
        self._progress.resume()
        self._metrics.resume()
        self._set_random()

    def _undo(self) -> None:
        """An epoch began, which it had done already, and what hooks have done then is in the state: restore once more."""
        random = Random().state()  # the order of the epoch is drawn from these
        self.checkpoint.restore(**self._wish)
        _set_random(random)

    def stay(self) -> None:
        """There was not one batch left to train with: say so, and leave the random numbers where they were."""
        if not self.resumed:
            return
        self._set_random()
        if self._trainer.is_global_zero:
            _LOG.warning(
                "nothing was left to train: the job in %s is at its end, after %s optimizer steps, and so is this model. Give "
                "another directory to begin anew, or the trainer more to do.",
                self.checkpoint.directory,
                self._trainer.global_step,
            )

    def before_epoch(self) -> None:
        """An epoch begins. After one that was over, its order is drawn from the numbers that were to come then."""
        if self.resumed and self._progress.over:
            self._set_random()

    def _set_random(self) -> None:
        _set_random(self._random)
        self._random = None

    def before_iteration(self, fetcher: Any) -> None:
        """See :class:`boundary.Watcher`."""
        self.position.before_iteration(fetcher)
        self._arrived = -1
        if self._place.loaded is not None:
            self._progress.count()  # Lightning 2.0 numbers the batch before it asks for it

    def aim(self) -> None:
        """Training begins: have the data go to where it was."""
        loaded = self._place.loaded
        if loaded is not None and not self._progress.over:
            self.position.go_to(loaded["position"])

    # -- saving -----------------------------------------------------------------------------------------------------

    def take(self, fetcher: Any, last: int, now: int, stop: bool) -> bool:
        """Take a snapshot if one is due after ``now`` optimizer steps, one batch after ``last``, or before a ``stop``.

        Return whether training is at a place that can be gone on from.
        """
        if now == last:  # nothing is new: gradients are accumulated, or the first batch comes
            return self._arrived == self.position.drawn
        self._take(fetcher, last, now, stop)
        return True

    def _take(self, fetcher: Any, last: int, now: int, stop: bool) -> None:
        disk = stop or self._disk.since(last, now)
        by_clock = not self._memory.steps
        if disk or by_clock or self._memory.since(last, now):
            self._place.fetcher = fetcher
            self._save(now - 1, True if disk else None, _PATIENCE_S if stop else None)
        self.due = 0.0 if by_clock else min(self._memory.after(now), self._disk.after(now))

    def finish(self) -> None:
        """Training is at its end: have that on disk."""
        if self._trainer.global_step > 0:
            self._progress.over, self._place.fetcher = True, None
            self._save(self._trainer.global_step - 1, True, _PATIENCE_S)

    def _save(self, step: int, disk: bool | None, wait: float | None) -> Receipt:
        return self.checkpoint.save(step, disk=disk, wait=wait)

    # -- leaving ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until the last one is on disk."""
        self.checkpoint.close()

    def leave(self, error: BaseException) -> None:
        """Leave after a failure: what is complete is made durable, and nobody waits for it."""
        self.checkpoint.__exit__(type(error), error, error.__traceback__)


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}_{number}"


class _AsItIs:
    """Gives back what it is given: a state that is in memory already."""

    @staticmethod
    def fresh(tree: Any) -> Any:
        return tree


def _set_random(state: Any) -> None:
    if state is not None:
        source: Any = _AsItIs()
        Random().load(state, source)
