"""``Guard``: watches loss and gradient norm, and takes all ranks back to the last good step when one of them goes bad.

    guard = resilience.Guard(checkpoint)                             # before restore(): what it knows is in the checkpoint
    start = checkpoint.restore(allow_fresh_start=True)
    for step, batch in guard.steps(loader, start, end):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if guard.bad(loss, norm):                                    # back at the last good step, on all ranks
            continue
        optimizer.step()
        checkpoint.save(step)

1) (every rank) judges its own figures, before the optimizer's step and before the save: what is bad is never saved
2) (all ranks) one small ``all_reduce``: the worst verdict counts for all
3) (all ranks, if it is bad) ``checkpoint.rollback()``; the batch that did it is left out, or the order is another one

Hazard: 2) is a collective in every watched step. All ranks call :meth:`Guard.bad` equally often.
"""

from __future__ import annotations

import logging
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
import torch.distributed as dist

from resilience.checkpoint import cuda
from resilience.checkpoint.judgement import Rules, Trouble, Verdict, verdict
from resilience.checkpoint.link import Place
from resilience.checkpoint.state import Stateful
from resilience.checkpoint.supply import Supply
from resilience.errors import CheckpointError, ConfigError, NothingToRestore, nearest

if TYPE_CHECKING:
    from resilience.checkpoint.flash import FlashCheckpoint

_LOG = logging.getLogger("resilience.checkpoint")
_NAME = "resilience.guard"  # of its part of the checkpoint, which need not be there
_DATA = ("skip", "keep", "reorder")
_NAN = ("rollback", "skip")
_FIGURES = ("loss", "grad_norm")
_STORIES = 16


class GuardError(CheckpointError):
    """Training goes bad again and again, or there is nothing to go back to."""


@dataclass(frozen=True)
class Watched:
    """A step whose figures are to be judged. They are read as late as possible."""

    step: int
    batch: int
    read: Callable[[], dict[str, float]]


class Guard:
    """Watches one training. Make it on all ranks, after ``init_process_group()`` and before ``checkpoint.restore()``.

    ``spike``: robust deviations above the median of the last ``window`` good steps, after ``warmup`` of them; ``None``: only NaN
    and infinity are bad. ``on_nan="skip"``: those only leave the update out. ``data``: what becomes of the batch that did it:
    ``"skip"``; ``"keep"``: it is tried once more, then left out; ``"reorder"``: what is left of the epoch comes in another order
    (``set_epoch``). More than ``max_rollbacks`` in a row, without ``patience`` good steps in between, raise :class:`GuardError`.
    ``lagged``: figures are judged one step later, which spares the device a wait. ``group``: all ranks, for CPU tensors; made here
    if the default one takes none. ``group=False``: nobody is asked, since all ranks give the same figures, to the last bit.
    """

    def __init__(
        self,
        checkpoint: FlashCheckpoint,
        *,
        spike: float | None = 10.0,
        window: int = 128,
        warmup: int = 64,
        on_nan: str = "rollback",
        data: str = "skip",
        max_rollbacks: int = 3,
        patience: int = 32,
        lagged: bool = False,
        group: Any = None,
    ) -> None:
        _check(spike, {"data": (data, _DATA), "on_nan": (on_nan, _NAN)}, window=window, warmup=warmup)
        _check(None, {}, max_rollbacks=max_rollbacks, patience=patience)
        if lagged and on_nan == "skip":
            raise ConfigError(
                'on_nan="skip" and lagged=True: a step later the update can no longer be left out. Give one.'
            )
        if warmup > window:
            raise ConfigError(f"warmup={warmup} is more than window={window}, which is all that is remembered.")
        if not checkpoint.parts or any(part.name == _NAME for part in checkpoint.parts):
            why = "has a guard already" if checkpoint.parts else "has nothing to go back to: name what it is made of"
            raise ConfigError(f"this FlashCheckpoint {why}. FlashCheckpoint(directory, model=…), and one Guard for it.")
        self._checkpoint = checkpoint
        self._rules = Rules(spike, window, warmup, on_nan == "skip")
        self._data, self._max, self._patience, self._lagged = data, max_rollbacks, patience, lagged
        self._place = Place.here()
        self._group = _group_of(group, self._place.world)
        self._word = torch.zeros((), dtype=torch.int64)
        self._past = {name: deque[float](maxlen=window) for name in _FIGURES}
        self._supply = Supply()
        self._trouble = Trouble()
        self._stories: list[str] = []  # what was done so far, in words
        self._skipped = 0  # updates in a row
        self._step = self._batch = -1
        self._late: Watched | None = None
        self._loaded: int | None = None  # the step to go on from, if the state was loaded since the last look
        self._again = False  # the step was bad: it comes once more
        checkpoint.parts.append(Stateful(_NAME, self))

    # -- the loop ---------------------------------------------------------------------------------------------------

    def steps(self, loader: Any, start: int, end: int) -> Iterator[tuple[int, Any]]:
        """Yield steps from ``start`` to below ``end``, each with a batch, over as many epochs as it takes; after a rollback, from
        the step that was gone back to. ``loader``: one of the three kinds of :mod:`supply`."""
        kept = any(isinstance(part, Stateful) and part.thing is loader for part in self._checkpoint.parts)
        self._supply.begin(loader, start, kept=kept, reorder=self._data == "reorder")
        self._step, self._loaded, self._late, self._again = start, None, None, False
        while self._step < end or (self._late is not None and self._catch_up()):
            self._batch, batch = self._supply.draw()
            yield self._step, batch
            if self._loaded is not None:
                self._step, self._loaded = self._loaded, None
            elif not self._again:
                self._step += 1
            self._again = False

    def _catch_up(self) -> bool:
        """Judge the last step, which no other one follows; return whether there is more to do."""
        late, self._late = self._late, None
        assert late is not None
        bad = self._judge(late)
        if self._loaded is not None:
            self._step, self._loaded = self._loaded, None
        return bad

    def bad(self, loss: torch.Tensor | float | None = None, grad_norm: torch.Tensor | float | None = None) -> bool:
        """Judge this step by its loss, its gradient norm, or both; before ``optimizer.step()``. If it is bad on any rank, all are
        back at the last good step when this returns (or the update is to be left out): go on with the next turn of the loop."""
        if self._step < 0:
            raise CheckpointError(
                "guard.bad() belongs in the loop: for step, batch in guard.steps(loader, start, end)."
            )
        seen: Watched | None = Watched(self._step, self._batch, _reader((loss, grad_norm), self._lagged))
        if self._lagged:
            seen, self._late = self._late, seen
        return seen is not None and self._judge(seen)

    def _judge(self, seen: Watched) -> bool:
        figures = seen.read()
        found, why = verdict(self._past, figures, self._rules, self._skipped)
        worst = self._worst(found)
        if worst == Verdict.OK:
            for name, value in figures.items():
                self._past[name].append(value)
            self._skipped = 0
            self._trouble = self._trouble.good(seen.batch, self._patience)
            return False
        culprits = self._culprits(found, figures)
        if worst == Verdict.SKIP:
            self._skip(seen, culprits, f"{self._skipped + 1} in a row")
        else:
            self._go_back(seen, culprits, why)
        return True

    # -- what all ranks do ------------------------------------------------------------------------------------------

    def _worst(self, found: Verdict) -> Verdict:
        if self._group is None:
            return found
        self._word.fill_(int(found))
        dist.all_reduce(self._word, op=dist.ReduceOp.MAX, group=self._group)
        return Verdict(int(self._word))

    def _culprits(self, found: Verdict, figures: dict[str, float]) -> str:
        """Return who found the step bad, and by which figures. Rare, so everybody tells everybody."""
        mine = torch.tensor([float(found), *(figures.get(name, 0.0) for name in _FIGURES)], dtype=torch.float64)
        told = [mine]
        if self._group is not None:
            told = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(told, mine, group=self._group)
        bad = [(rank, word.tolist()) for rank, word in enumerate(told) if word[0] > 0]
        few = [
            f"rank {self._place.rank if self._group is None else dist.get_global_rank(self._group, rank)}: "
            + ", ".join(f"{name} {word[1 + at]:.6g}" for at, name in enumerate(_FIGURES) if name in figures)
            for rank, word in bad[:8]
        ]
        return "; ".join(few) + (f" and {len(bad) - 8} ranks more" if len(bad) > 8 else "")

    def _skip(self, seen: Watched, culprits: str, times: str) -> None:
        """Leave an update out. The batch is gone, the step is made with the next one."""
        self._skipped += 1
        self._again = True
        self._drop_gradients()
        self._tell("step %s is bad (%s): its update is left out, %s.", seen.step, culprits, times)

    def _drop_gradients(self) -> None:
        for part in self._checkpoint.parts:
            if isinstance(optimizer := getattr(part, "optimizer", None), torch.optim.Optimizer):
                optimizer.zero_grad()

    def _go_back(self, seen: Watched, culprits: str, why: str) -> None:
        self._late = None  # it is of what is gone
        self._trouble = self._trouble.bad(seen.step, seen.batch)
        self._skipped = 0
        what = f"step {seen.step}, batch {seen.batch} ({culprits})"
        if self._trouble.row > self._max:
            raise GuardError(self._given_up(what, self._too_often()))
        deeper = self._trouble.again - (self._data == "keep")
        # Nobody went back yet where nothing was saved: then there is nothing deeper either.
        further = deeper > 0 and self._trouble.back_at >= 0
        before = self._trouble.back_at if further else (seen.step if self._lagged else None)
        self._loaded = None
        try:
            start = self._checkpoint.rollback(before=before)
        except NothingToRestore as error:
            if before is not None:
                raise GuardError(self._given_up(what, f"and there is nothing older to go back to: {error}")) from error
            self._note(f"{what}: nothing is saved yet")
            times = f"time {self._trouble.row} of at most {self._max}"
            self._skip(seen, culprits, f"since nothing is saved yet to go back to, {times}")
            return
        if self._loaded is None:  # it was saved before there was a guard
            self._supply.went_back_by(self._step + 1 - start)
        self._loaded = start
        self._trouble = self._trouble.went_back(start - 1)
        data = self._treat(seen.batch, deeper)
        self._note(f"{what}: back to step {start - 1}")
        times = f"rollback {self._trouble.row} of at most {self._max} in a row"
        here = f" (here: {why})" if why else ""
        self._tell(
            "%s is bad%s. All ranks are back at step %s; %s; %s.", what, here, start - 1, data, times, loud=bool(why)
        )

    def _treat(self, batch: int, deeper: int) -> str:
        """Do something about the data, so that the same does not come again; say what."""
        if deeper < 0:
            return "the data is tried once more"
        if self._data == "reorder":
            self._supply.orders += 1
            self._supply.reopen()
            return "the data comes in another order"
        first = self._supply.drawn if deeper > 0 and self._supply.drawn is not None else batch
        self._supply.leave_out(first, batch)
        return f"batch {batch} is left out" if first == batch else f"batches {first} to {batch} are left out"

    def _note(self, story: str) -> None:
        self._stories = [*self._stories, story][-_STORIES:]

    def _too_often(self) -> str:
        if self._trouble.back_at < 0:
            return f"after {self._max} times that nothing was saved yet to go back to"
        return f"after {self._max} rollbacks in a row"

    def _given_up(self, what: str, why: str) -> str:
        before = "; ".join(self._stories) or "nothing"
        known_good = self._trouble.back_at >= 0 and not self._lagged  # judged later, a bad step may have been saved
        saved = "What is saved is the last good step. " if known_good else ""
        return (
            f"training is bad at {what}, {why} (rank {self._place.rank} on {socket.gethostname()}). Before it: {before}. {saved}"
            "Look at these batches and at the learning rate; Guard(spike=…) sets what counts as a spike."
        )

    def _tell(self, text: str, *words: object, loud: bool = False) -> None:
        level = logging.WARNING if loud or self._place.rank == 0 else logging.INFO
        _LOG.log(level, f"{text} (rank %s)", *words, self._place.rank)

    # -- what is saved ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, what is usual, and what went wrong so far."""
        past = {name: array("d", values).tobytes() for name, values in self._past.items()}
        known = {"trouble": asdict(self._trouble), "stories": self._stories}
        return {"step": self._step, "supply": self._supply.state(), "past": past, **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back or on to a state. What went wrong, and what is not to be given out again, is not forgotten by going back."""
        self._supply.load(state["supply"])
        for name, values in self._past.items():
            values.clear()
            values.extend(array("d", state["past"].get(name, b"")))
        if not self._trouble.row:
            self._trouble = Trouble(**state["trouble"])
        self._stories = self._stories or list(state["stories"])
        self._late, self._loaded = None, state["step"] + 1


def _reader(figures: tuple[Any, Any], lagged: bool) -> Callable[[], dict[str, float]]:
    """Return what reads the figures of a step. They are read at once, but for those that a device still computes."""
    given: dict[str, Any] = {name: value for name, value in zip(_FIGURES, figures, strict=True) if value is not None}
    if not given:
        raise ConfigError("guard.bad() was given nothing to judge: guard.bad(loss), guard.bad(loss, grad_norm).")
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
            raise _no_figure(name, f"a tensor of shape {list(value.shape)} and {value.dtype}")
    devices = [value.device for value in given.values() if isinstance(value, torch.Tensor) and value.is_cuda]
    if lagged and devices:
        later = cuda.read_later([torch.as_tensor(value) for value in given.values()], devices[0])
        return lambda: dict(zip(given, later(), strict=True))
    known = {name: _number(name, value) for name, value in given.items()}
    return lambda: known


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach())
    try:
        if isinstance(value, SupportsFloat):  # a text is none, though float() would read it
            return float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array of several; too large an int
        raise _no_figure(name, f"a {type(value).__qualname__} ({error})") from error
    raise _no_figure(name, f"a {type(value).__qualname__}")


def _no_figure(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"guard.bad({name}=…) was given {what}, which is no single real number. The step was not judged. Give a number, or a "
        "tensor with one element: loss.mean(), clip_grad_norm_(…)."
    )


def _group_of(group: Any, world: int) -> Any:
    """Return the processes that decide together, ``None`` for a single one. Their word travels in CPU memory: on a device it would
    wait for the training."""
    if group is False:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if world > 1:
            raise ConfigError(
                f"{world} ranks have to decide together whether a step is bad, and torch.distributed is not initialised. Nothing "
                "was set up. Make the guard after init_process_group()."
            )
        return None
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError("group: give one of all ranks; they go back together.")
    if dist.get_world_size() == 1 or group is not None:
        return group
    return dist.group.WORLD if "cpu:" in dist.get_backend_config() else dist.new_group(backend="gloo")


def _check(spike: float | None, words: dict[str, tuple[str, tuple[str, ...]]], **numbers: int) -> None:
    """Raise :class:`ConfigError` for what can't be meant."""
    if spike is not None and (isinstance(spike, bool) or not isinstance(spike, (int, float)) or not spike > 0):
        raise ConfigError(f"spike={spike!r}: give deviations above the median, more than 0, or None.")
    for name, (value, known) in words.items():
        if value not in known:
            raise ConfigError(f"{name}={value!r}: give one of {', '.join(known)}.{nearest(str(value), known)}")
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"{name}={number!r}: give a whole number from 1 up.")
