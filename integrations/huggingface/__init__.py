"""Hugging Face: a callback that links a ``Trainer`` to the launcher.

    trainer = Trainer(…, callbacks=[ResilienceCallback()])
    trainer.train(resume_from_checkpoint=last_checkpoint(trainer))

Heartbeats, sections, an agreed stop with a checkpoint of the trainer's own, simulated faults, and the mark of a finished training.
Snapshots in memory are not among them: where in the data a training goes on is decided from a folder of the trainer's own before
any callback is called, and no hook is there to move it. So a restarted job goes on from the trainer's newest checkpoint.
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as missing:
    raise ImportError(
        "transformers is not installed: pip install 'resilience-sdk[huggingface]' brings it."
    ) from missing

from resilience.integrations import finished
from resilience.integrations.faults import Faults, parse

from resilience import config
from resilience.pulse import client

__all__ = ["ResilienceCallback", "last_checkpoint"]


def last_checkpoint(trainer: Any) -> str | None:
    """Return the newest checkpoint in a trainer's output folder, or ``None`` for a training that begins."""
    folder = trainer.args.output_dir
    try:
        found = get_last_checkpoint(folder)
    except FileNotFoundError:
        return None
    return str(found) if found is not None else None


class ResilienceCallback(TrainerCallback):
    """``simulated_fault_params``: see :class:`resilience.integrations.faults.SimulatedFaultParams`.

    From one step to the next everything is in the section ``step``, but for what the trainer does when one is over: logging,
    evaluation and saving are in ``between steps``, for no hook says when they begin.
    """

    def __init__(self, simulated_fault_params: Any = None) -> None:
        self._given = parse(simulated_fault_params)
        self._faults: Faults | None = None
        self._expecting: client.expect_heartbeats | None = None
        self._step, self._rest = client.section("step"), client.section("between steps")
        self.stopped = False

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer is made."""
        client.end_all_sections()
        client.section("setup").enter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model, data and optimizer are there, and what a checkpoint had is restored."""
        env = config.rank_environment()
        self._faults = Faults(self._given, args.process_index, args.world_size, env.cycle, env.run)
        self.stopped = False
        client.section("setup").leave()
        self._expecting = client.expect_heartbeats()
        self._expecting.__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch is there."""
        self._rest.leave()
        self._step.enter()
        if self._faults:
            self._faults.strike(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer has made its step. All ranks stop here, at the same one, if somebody wants them to."""
        self._step.leave()
        self._rest.enter()
        client.heartbeat(state.global_step - 1)
        if client.stop_requested():
            self.stopped = True
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The loop is over. A training that was stopped is not complete."""
        self._rest.leave()
        expecting, self._expecting = self._expecting, None
        if expecting is not None:
            expecting.__exit__(None, None, None)
        if state.is_world_process_zero and not self.stopped:
            finished.leave_mark()
