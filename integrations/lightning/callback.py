"""``ResilienceCallback``: one callback that links a Lightning trainer to everything.

    trainer = Trainer(callbacks=[ResilienceCallback("checkpoints")], …)
    trainer.fit(model)

Started with ``resilience run`` every rank is watched over its whole life, snapshots are taken behind the training, and a restarted
job goes on between the same two batches where it was. Under plain ``python`` and ``torchrun`` nobody watches, and snapshots and
restoring are the same.

Rule: a hook here is a few stores into a page; what is rare (opening, restoring, leaving) has a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from resilience.integrations import finished
from resilience.integrations.faults import Faults, parse
from resilience.integrations.lightning import boundary, flavour, policy, signals
from resilience.integrations.lightning.checkpoint_io import prepare
from resilience.integrations.lightning.progress import begin_as_usual
from resilience.integrations.lightning.snapshots import Snapshots

from resilience import config
from resilience.pulse import client
from resilience.pulse.rank_monitor_client import RankMonitorClient

_LOG = logging.getLogger("resilience.lightning")
_ASK_EVERY_S = 60.0  # what was learned about timeouts goes with the checkpoints, this fresh


class Hooks:
    """What Lightning calls. ``directory``: where snapshots go, by default ``flash`` below the trainer's root.

    ``memory_every`` and ``disk_every``: optimizer steps or a ``timedelta`` between snapshots, and between those that are written to
    disk; ``"auto"`` follows from what one costs. ``mode="overlap"`` copies behind the next forward and backward.
    ``snapshots=False``: only watched. ``exc_handling_policy``: what follows an exception, see :mod:`policy`.
    ``simulated_fault_params``: see :mod:`faults`.
    ``allow_other_world``: go on with another number of ranks, although a place in the data may mean something else then.
    ``strict=False``: load what fits of a snapshot of another model.
    Everything else is an option of ``FlashCheckpoint``: ``keep``, ``keep_every``, ``slots``, ``replicas``, ``verify``, ….
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        memory_every: int | timedelta | str = 1,
        disk_every: int | timedelta | str | None = timedelta(minutes=5),
        mode: str = "overlap",
        snapshots: bool = True,
        exc_handling_policy: policy.Policy = None,
        simulated_fault_params: Any = None,
        allow_other_world: bool = False,
        strict: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        policy.check(exc_handling_policy)
        self._directory = directory
        self._settings = {"memory_every": memory_every, "disk_every": disk_every}
        self._options = {"mode": mode, **options}
        self._wants_snapshots = snapshots
        self._policy = exc_handling_policy
        self._given_faults = parse(simulated_fault_params)
        self._allow_other_world, self._strict = allow_other_world, strict
        self._snapshots: Snapshots | None = None
        self._signals = signals.Signals()
        self._expecting: client.expect_heartbeats | None = None
        self._leaves_mark = True  # if the environment names a file for it
        self._saving = False  # a checkpoint of Lightning's is being written
        self._reads_late = False  # the strategy loads ckpt_path after we have restored
        self._first = True
        self._last = 0
        self._sanity_steps: int | float | None = None
        self._learned: dict[str, Any] = {}
        self._asked_at = 0.0
        self._faults: Faults | None = None
        self._strike: Callable[[], None] | None = None
        self._steps: Any = None  # counts optimizer steps, see boundary.counter
        self._asked: Callable[[], bool] = signals.never  # whether all ranks are to stop now
        self._step: Any = None  # sections; made where the rank runs, since a callback may be sent to another process
        self._batch: Any = None

    # -- beginning --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The strategy's environment is there, the model is not set up yet."""
        flavour.check(trainer, self)
        flavour.tell_who(trainer)
        client.end_all_sections()
        self._step, self._batch = client.section("step"), client.section("validation step")
        self._saving = False
        if stage != "fit":
            return
        client.section("setup").enter()
        self._signals.note()
        env = config.rank_environment()
        self._faults = Faults(self._given_faults, trainer.global_rank, trainer.world_size, env.cycle, env.run)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model, strategy and optimizers are there: take the memory, and restore."""
        self._first, self._last = True, trainer.global_step
        if trainer.fast_dev_run:
            return
        prepare(trainer)
        if not self._wants_snapshots:
            return
        flavour.check_world(trainer)
        directory = self._directory if self._directory is not None else Path(trainer.default_root_dir) / "flash"
        self._snapshots = Snapshots(
            directory,
            **self._settings,
            allow_other_world=self._allow_other_world,
            strict=self._strict,
            options=self._options,
        )
        try:
            self._last = self._snapshots.open(trainer)
        except BaseException:
            self._snapshots = None
            raise
        if self._snapshots.resumed:
            self._sanity_steps, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0
            self._put_aside(trainer)

    def _put_aside(self, trainer: Any) -> None:
        """A snapshot of this job is further than the checkpoint that the script begins with."""
        self._reads_late = bool(trainer.strategy.restore_checkpoint_after_setup)  # then it is not known yet
        if not trainer.ckpt_path:
            return
        _LOG.info(
            "the job goes on from its snapshot, after %s optimizer steps, and not from ckpt_path=%s. To begin there, give an empty "
            "directory.",
            trainer.global_step,
            trainer.ckpt_path,
        )
        trainer._checkpoint_connector._loaded_checkpoint = {}

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        client.section("sanity check").enter()

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        client.section("sanity check").leave()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The data is there, and the loops begin."""
        if self._sanity_steps is not None:
            trainer.num_sanity_val_steps, self._sanity_steps = self._sanity_steps, None
        reads_late, self._reads_late = self._reads_late, False
        if reads_late and trainer.ckpt_path and self._snapshots is not None:
            self._last = self._snapshots.restore()
            begin_as_usual(trainer.fit_loop)
        faults = self._faults
        self._strike = (lambda: faults.strike(trainer.global_step)) if faults else None
        self._asked = self._signals.take()
        self._expecting = client.expect_heartbeats()
        self._expecting.__enter__()
        if self._snapshots is not None:
            self._snapshots.aim()
        self._watch(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning. The loaders may be new ones."""
        self._over()
        client.section("epoch end").leave()
        if self._snapshots is not None:
            self._snapshots.before_epoch()
        self._watch(trainer)

    def _watch(self, trainer: Any) -> None:
        self._steps = boundary.counter(trainer)
        boundary.watch(trainer, self)

    # -- between two batches, and in them ---------------------------------------------------------------------------

    # Lightning spends 3 µs on calling a hook, also one that does nothing, unless it can't be called. The fetcher tells all that
    # these would: a step is what happens from one batch to the next, without validation, saving and the end of an epoch.
    on_train_batch_start: Any = None
    on_train_batch_end: Any = None
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None

    def before_iteration(self, fetcher: Any) -> None:
        """See :class:`boundary.Watcher`."""
        if self._snapshots is not None:
            self._snapshots.before_iteration(fetcher)

    def before_batch(self, fetcher: Any) -> None:
        """Everything of the last batch is over, and the next one is not fetched yet."""
        if self._saving:
            self._over()
        if self._first:
            self._begin(fetcher)
        step = self._steps.completed
        stop = self._asked()
        snapshots = self._snapshots
        whole = step != self._last or not step
        if snapshots is not None:
            if stop or step >= snapshots.due:
                self._step.close()  # a snapshot is no part of it
                whole = snapshots.take(fetcher, self._last, step, stop)
            snapshots.position.before_batch(fetcher)
        self._last = step
        self._step.over(step - 1 if step else None)
        if stop and whole:
            raise signals.Stopped(step - 1)

    def _begin(self, fetcher: Any) -> None:
        self._first = False
        if self._snapshots is not None:
            self._snapshots.arrive(fetcher)
        client.section("setup").leave()

    def after_batch(self) -> None:
        """The batch is there. Forward, backward, the reduction of gradients and the optimizer's step follow."""
        self._step.__enter__()
        if self._strike is not None:
            self._strike()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning. What other callbacks and the module do now has a clock of its own."""
        self._over()
        client.section("epoch end").enter()
        self._ask()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        self._over()
        if not trainer.sanity_checking:
            client.section("validation").enter()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """See Lightning."""
        self._batch.enter()

    def on_validation_batch_end(  # noqa: PLR0917 - Lightning's
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """See Lightning."""
        self._batch.leave()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning. Checkpoints that are written now are so outside of it."""
        if not trainer.sanity_checking:
            client.section("validation").leave()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        client.section("test").enter()

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        client.section("test").leave()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        client.section("predict").enter()

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        client.section("predict").leave()

    # -- checkpoints of Lightning's ---------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written. Nobody says when that is over; the next thing that happens says so."""
        if not self._saving:
            self._step.leave()
            self._saving = True
            client.section("checkpointing").enter()

    def _over(self) -> None:
        """A step is over, and whatever was saved in it."""
        self._step.close()
        if self._saving:
            self._saving = False
            client.section("checkpointing").leave()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned about timeouts, for snapshots and for Lightning's checkpoints."""
        return {"timeouts": self._learned} if self._learned else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the launcher know what was learned before."""
        self._learned = state_dict["timeouts"]
        RankMonitorClient().load_state_dict(self._learned)

    def _ask(self) -> None:
        """Ask the launcher what was learned, now and then. Behind the training: it may be dead."""
        if time.monotonic() < self._asked_at + _ASK_EVERY_S:
            return
        self._asked_at = time.monotonic()

        def ask() -> None:
            found = RankMonitorClient().state_dict()
            if found["learned"] or found["calculated"]:
                self._learned = found

        threading.Thread(target=ask, name="resilience-timeouts", daemon=True).start()

    # -- the end ----------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning. Whatever is left is teardown."""
        self._over()
        client.section("epoch end").leave()
        client.section("teardown").enter()
        boundary.release(trainer)
        if self._snapshots is not None:
            self._snapshots.finish()
        client.heartbeat(trainer.global_step - 1 if trainer.global_step else None)
        self._relax()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See Lightning. Not called after an exception."""
        if stage != "fit":
            return
        self._over()
        if self._snapshots is not None:
            closing, self._snapshots = self._snapshots, None
            closing.close()
            if self._first:
                closing.stay()
        if self._leaves_mark and trainer.is_global_zero and finished.is_complete(finished.End.of(trainer)):
            finished.leave_mark()
        client.end_all_sections()
        client.done()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Whatever ends the training is recorded; an agreed stop is no failure."""
        leaving, self._snapshots = self._snapshots, None
        boundary.release(trainer)
        if isinstance(exception, signals.Stopped):
            client.end_all_sections()
            self._relax()
            with client.section("teardown"):
                if leaving is not None:
                    leaving.close()
            client.done()
            _LOG.log(
                logging.INFO if exception.code == 0 else logging.WARNING, "%s. Start it again to go on.", exception
            )
            return
        action = policy.follow(self._policy, exception)
        if leaving is not None:
            leaving.leave(exception)
        if self._leaves_mark and action is policy.WorkloadAction.ShutdownWorkload:
            finished.leave_mark()  # whichever rank it is: there will be no other job
        client.end_all_sections()
        self._relax()

    def _relax(self) -> None:
        expecting, self._expecting = self._expecting, None
        if expecting is not None:
            expecting.__exit__(None, None, None)
