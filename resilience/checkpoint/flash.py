"""``FlashCheckpoint``: the state of training in memory within milliseconds, on disk behind its back.

    checkpoint = resilience.FlashCheckpoint("checkpoints", model=model, optimizer=optimizer, loader=loader)
    start = checkpoint.restore(allow_fresh_start=True)
    for step, batch in enumerate(loader, start):
        train_step(model, optimizer, batch)
        checkpoint.save(step)

Rule: ``save`` copies and returns; it talks to nobody. Whatever is rare (coming, restoring, leaving) has a deadline.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from resilience.checkpoint import options, progress, stores, turns
from resilience.checkpoint.attendant import Attendant
from resilience.checkpoint.census import Census
from resilience.checkpoint.coming import come
from resilience.checkpoint.link import Link, Place
from resilience.checkpoint.optimizers import Optimizer
from resilience.checkpoint.overlap import Copier, Later
from resilience.checkpoint.plan import Collected
from resilience.checkpoint.reading import Opened
from resilience.checkpoint.receipt import Level, Receipt, Saves
from resilience.checkpoint.restore import MisfitError, Wish, agree, begin_afresh, load_parts, refuse_other_world
from resilience.checkpoint.saver.restoring import Back
from resilience.checkpoint.schedule import Interval, Intervals
from resilience.checkpoint.slots import COMPLETE
from resilience.checkpoint.stager import Stager
from resilience.checkpoint.state import Part, parts_of
from resilience.checkpoint.together import Together
from resilience.checkpoint.turns import Turns
from resilience.errors import (
    CheckpointError,
    ConfigError,
)

_LOG = logging.getLogger("resilience.checkpoint")
_PATIENCE_S = 0.1
Taken = tuple[Collected, bytes, Later | None]  # tensors; everything else; how they are copied behind the training


class FlashCheckpoint:
    """Snapshots of everything that training consists of.

    ``directory``: where checkpoints go, a path or a URL that fsspec knows. ``things``: what they are made of, by name: modules,
    optimizers, and anything with ``state_dict()`` and ``load_state_dict()``. Slots are allocated here, before step 0; what does not
    fit is said here.

    ``memory_every``: steps, a ``timedelta`` or ``"auto"`` between snapshots; 1: every call takes one. ``disk_every``: the same,
    between those that are written to disk; ``None``: only what is left at the end or after a failure. ``"auto"`` follows from what
    one costs and ``mean_time_between_failures``, by Young and Daly. ``keep``: so many checkpoints stay on
    disk, and every ``keep_every``-th step for good. ``replicated``: names of things that are the same on all ranks (what is inside
    DDP is known to be). ``mode="overlap"``: what only optimizers write is copied behind the next forward and backward, and they
    wait for that; see :mod:`overlap`. ``verify``: every byte of it is compared afterwards. ``on_save_error``: ``"raise"`` or
    ``"warn"`` in the next call after a save failed in the background, up to ``max_failures`` in a row.
    ``replicas``: so many other nodes keep copies in their memory, sent through ``replica_interface`` (a name, or an address) at
    ``replica_bandwidth`` at most (bytes per second, or a text: ``"2GB/s"``).
    """

    # Of this process only, whatever the size of the job: for who is given a state that the others have not.
    _alone = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        memory_every: Interval = 1,
        disk_every: Interval = timedelta(minutes=5),
        keep: int = 3,
        keep_every: int = 0,
        slots: int | None = None,
        replicas: int = 0,
        replica_interface: str | None = None,
        replica_bandwidth: float | str | None = None,
        replicated: Iterable[str] = (),
        mode: str = "blocking",
        verify: bool = False,
        rng: bool = True,
        on_save_error: str = "raise",
        max_failures: int = 3,
        mean_time_between_failures: timedelta | None = None,
        restore_timeout: float | timedelta = 600.0,
        **things: Any,
    ) -> None:
        options.check(
            things,
            replicated,
            on_save_error,
            slots=slots,
            flags={"rng": rng, "verify": verify},
            mode=mode,
            keep=(keep, 1),
            keep_every=(keep_every, 0),
            max_failures=(max_failures, 1),
            replicas=(replicas, 0),
        )
        replication = options.Replication.of(replicas, replica_interface, replica_bandwidth, slots)
        self.directory = stores.where(directory)
        self._place = place = Place.single() if self._alone else Place.here()
        self._replication = replication.without(place.alone)
        self._every = Intervals.of(memory_every, disk_every)
        self._restore_timeout = options.seconds("restore_timeout", restore_timeout)
        self._parts, self._together = parts_of(things, replicated, rng) if things else ([], Together(needed=False))
        self._saves, self._census = Saves(), Census()
        told = options.for_saver((keep, keep_every), self._every, mean_time_between_failures, place, replication)
        self._stay = turns.Stay(self.directory, self)
        self._link = Link(str(self.directory), place, told)
        self._stager, self._turns = self._come(replication.slots(slots))
        optimizers = [part.optimizer for part in self._parts if isinstance(part, Optimizer)]
        self._copier = Copier(mode, verify, optimizers, self._tried)
        raises = on_save_error == "raise"
        self._attendant = Attendant(self._link, self._stager, place, raises=raises, most=max_failures)

    def _come(self, number: int) -> tuple[Stager, Turns]:
        """Get this rank's memory, and look at what an earlier run left on disk. Nothing is set up if that fails."""
        try:
            stager = come(
                self._link,
                self._place,
                directory=self.directory,
                number=number,
                parts=self._parts,
                collect=lambda: self._census.of_parts(self._parts),
                timeout=self._restore_timeout,
                replicas=self._replication.replicas,
            )
            in_memory = [seal.step for seal in stager.ledger.seals()]
            return stager, Turns(self.directory, turns.earlier_step(self.directory, in_memory))
        except BaseException:
            self._stay.end()
            self._link.close()
            raise

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, step: int, *, disk: bool | None = None, wait: float | timedelta | None = None) -> Receipt:
        """Take a snapshot of the state after ``step``. Returns when the bytes are copied; durability follows behind.

        ``disk``: have this one written to disk, or not, whatever ``disk_every`` says. ``wait``: how long to wait for a free slot; a
        save that finds none is SKIPPED, and what was due on disk is the next one. By default that is a tenth of a second, in which
        a saver that is alive has answered, and nothing after a save that waited in vain. Raises for a state that can't be kept,
        and for earlier failures in the background as ``on_save_error`` asks. All ranks call it at the same steps, which grow.
        """
        if not self._parts:
            raise CheckpointError(
                "nothing to save was given: FlashCheckpoint(directory, model=…), or use save_state(step, state)."
            )
        return self._save(step, disk, wait, lambda: (*self._census.of_parts(self._parts), self._copier.later()))

    def save_state(
        self, step: int, state: Any, *, disk: bool | None = None, wait: float | timedelta | None = None
    ) -> Receipt:
        """Take a snapshot of any nested state of tensors and plain values, as one would give it to ``torch.save``."""
        return self._save(step, disk, wait, lambda: (*self._census.of_state(state), None))

    def _save(
        self, step: int, disk: bool | None, wait: float | timedelta | None, collect: Callable[[], Taken]
    ) -> Receipt:
        self._stay.check()
        usual = 0.0 if self._saves.in_vain else _PATIENCE_S
        patience = usual if wait is None else options.seconds("wait", wait)
        with self._turns:
            self._copier.join()
            return self._take(turns.whole_step("save", step), disk, patience, collect)

    def _take(self, step: int, disk: bool | None, wait: float, collect: Callable[[], Taken]) -> Receipt:
        self._turns.check(step)
        self._attendant.hear()
        self._attendant.look()
        if disk is None:
            disk = self._saves.owed or self._every.disk.has(step)
        if (
            not disk
            and not self._every.memory.has(step)
            and not self._together.heard(self._stager.is_armed(step), not self._every.memory.steps)
        ):
            self._stager.tried(step)
            return Receipt.ended(step, Level.SKIPPED, f"not due: {self._every.memory}")
        self._stager.serve()
        copying = None
        try:
            slot = self._stager.choose(step, wait, self._await_room)
            if not self._together.all(not isinstance(slot, Receipt)) and not isinstance(slot, Receipt):
                slot = Receipt.ended(step, Level.SKIPPED, "another rank had no room for it")
            self._saves.in_vain = isinstance(slot, Receipt)
            if isinstance(slot, Receipt):
                receipt, self._saves.owed = slot, self._saves.owed or disk
            else:
                taken = collect()
                self._saves.kept = receipt = self._stager.stage(slot, step, *taken, disk=disk)
                copying, self._saves.owed = taken[2], self._saves.owed and not disk
                self._turns.saved(step)
        finally:
            if copying is None:
                self._tried(step)
        self._saves.newest = receipt
        return receipt

    def _tried(self, step: int) -> None:
        """This rank is through with a step. Called by the thread that copies, where one does."""
        self._stager.tried(step)
        self._link.nudge()

    def _await_room(self) -> None:
        self._attendant.look()
        self._link.nudge()
        time.sleep(0.002)

    # -- restoring --------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        allow_fresh_start: bool = False,
        weights_only: bool = False,
        strict: bool = True,
        allow_other_world: bool = False,
    ) -> int:
        """Bring everything back to the newest step that all ranks can reach, or to ``step``; return the step to go on from.

        From memory if it is there, else from disk; digests are checked. With ``allow_fresh_start`` 0 is returned where there is
        nothing; otherwise that raises :class:`NothingToRestore`. ``weights_only``: modules only. ``strict=False``: what is on one
        side only is left as it is, and said. Another number of ranks than it was saved by is fine for modules, optimizers and
        what is ``replicated``; with ``allow_other_world`` the rest goes to the ranks that were there. All ranks call it.
        """
        wish = Wish(strict, alone=weights_only, any_world=allow_other_world)
        parts = [part for part in self._parts if part.weights or not weights_only]

        def load(opened: Opened) -> None:
            load_parts(parts, opened, self._place, wish, self._together)

        found = self._agree(step, load, allow_fresh_start)
        if found is None:
            begin_afresh(step, allow_fresh_start, self._place, self.directory)
        return 0 if found is None else found + 1

    def rollback(self, steps: int = 0, *, before: int | None = None) -> int:
        """Go back in the middle of training: all ranks together, to the newest snapshot that is at least ``steps`` steps older than
        the newest one (and of a step below ``before``); return the step to go on from.

        From memory if it is there, else from disk; digests are checked. What was saved after it is void, on disk too. Gradients
        are dropped. Make iterators over a loader anew. Where nothing is so old, :class:`NothingToRestore` names what there is.
        """
        back = Back(
            turns.whole_step("rollback", steps), before if before is None else turns.whole_step("before", before)
        )

        def load(opened: Opened) -> None:
            load_parts(self._parts, opened, self._place, Wish(), self._together)

        found = self._agree(None, load, back=back)
        assert found is not None
        for part in self._parts:
            if part.optimizer is not None:
                part.optimizer.zero_grad()
        return found + 1

    def load_state(self, step: int | None = None, *, allow_other_world: bool = False) -> Any:
        """Return the state that :meth:`save_state` was given last, or at ``step``. Raises :class:`NothingToRestore`.

        What was spread over ranks comes back whole. With ``allow_other_world`` a rank that was not there is given what rank 0 had.
        """
        states: list[Any] = []

        def load(opened: Opened) -> None:
            if not isinstance(opened.values, dict) or opened.values.keys() != {"state"}:
                raise MisfitError("it was saved by save(), and restore() gives it back")
            refuse_other_world(["the state"], opened, self._place, allow_other_world)
            states[:] = [opened.source.fresh(opened.values["state"])]

        if self._agree(step, load) is None:
            begin_afresh(step, False, self._place, self.directory)
        return states[0]

    def _agree(
        self, step: int | None, load: Callable[[Opened], None], fresh: bool = False, back: Back | None = None
    ) -> int | None:
        self._stay.check()
        with self._turns:
            self._copier.join()
            self._attendant.ask({"op": "here"})  # if the saver has just died, another one is asked
            return agree(
                self._link,
                self._place,
                self.directory,
                step=None if step is None else turns.whole_step("restore", step),
                back=back,
                fresh=fresh,
                load=load,
                begin=self._begin,
                timeout=self._restore_timeout,
                known=self._stager.mapped,
                ranks=self._together,
            )

    def _begin(self, generation: int) -> None:
        self._turns.begin()
        self._link.generation = generation
        self._stager.begin(generation)

    # -- waiting and leaving ----------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """Return the newest step that is complete in memory, or on disk; ``None`` where there is none."""
        self._stay.check()
        seals = [seal for seal in self._stager.ledger.seals() if seal.decision == COMPLETE]
        stored = stores.opened(self.directory).stored()
        keys = [seal.key for seal in seals] + [item.manifest.key for item in stored[:1]]
        return max(keys)[1] if keys else None

    def wait(
        self, step: int | None = None, level: Level = Level.DURABLE, timeout: float | timedelta = 600.0
    ) -> Receipt:
        """Wait until a save (the newest, or that of ``step``) has come to ``level``; return its receipt, whatever it says then."""
        self._stay.check()
        self._copier.join()
        receipt, level = self._find(step), options.level(level)
        if level == Level.REPLICATED and not self._replication.replicas:
            raise ConfigError(
                "wait(level=REPLICATED): nothing is replicated; that takes replicas=1 and more than one node."
            )
        self._attendant.await_level(receipt, level, options.seconds("timeout", timeout))
        return receipt

    def _find(self, step: int | None) -> Receipt:
        chosen = self._saves.newest if step is None else self._stager.receipt_of(step)
        if chosen is None:
            raise CheckpointError(f"no save {'was made' if step is None else f'of step {step} is in memory'}.")
        return chosen

    def close(self, timeout: float | timedelta = 600.0) -> None:
        """Leave: what is complete is made durable first, with progress shown on a terminal."""
        if not self._stay.end():
            return
        try:
            self._copier.close()
            self._attendant.ask({"op": "bye"})
            if self._saves.newest is not None and self._saves.newest.level in (Level.SKIPPED, Level.FAILED):
                _LOG.warning("the last save is not kept: %r. save(step, wait=60) waits for room.", self._saves.newest)
            if self._saves.kept is not None and self._saves.kept.level is not Level.FAILED:
                with progress.shown(
                    f"writing step {self._saves.kept.step}", self._stager.written, shows=self._place.rank == 0
                ):
                    self._attendant.await_end(self._saves.kept, options.seconds("timeout", timeout))
        finally:
            self._link.close()
            self._stager.close()

    def __enter__(self) -> FlashCheckpoint:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        elif self._stay.end():  # with an error: the saver makes durable what is complete; nobody waits for it
            self._copier.close()
            self._link.leave()
            self._stager.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was left: nothing can be saved or restored any more."""
        return self._stay.is_over

    @property
    def parts(self) -> list[Part]:
        """What it is made of. Whoever wants to be a part of it adds itself before ``restore()``."""
        return self._parts
