"""What ranks have to do together, or not at all: states that take a collective to form.

A rank that takes part in a collective while another does not waits for it until the process group gives up. So before each they
agree, by a collective of one number, in which every rank takes part whatever has become of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import distributed

from resilience.checkpoint.source import DamagedError


class Together:
    """Agreement of all ranks, where it is ``needed``; otherwise each goes by itself."""

    def __init__(self, needed: bool) -> None:
        self.needed = needed

    def all(self, mine: bool) -> bool:
        """Whether all ranks say so."""
        return self._reduced(mine, distributed.ReduceOp.MIN) if self.needed else mine

    def any(self, mine: bool) -> bool:
        """Whether a rank says so."""
        return self._reduced(mine, distributed.ReduceOp.MAX) if self.needed else mine

    def heard(self, mine: bool, by_clock: bool) -> bool:
        """Whether the saver's clock wants a snapshot. Not all ranks may have heard it; where no clock is used, none asks."""
        return mine if not self.needed else by_clock and self.any(mine)

    @contextlib.contextmanager
    def or_none(self) -> Iterator[None]:
        """Go on behind this only if no rank has raised in it."""
        try:
            yield
        except BaseException:
            self.all(False)
            raise
        if not self.all(True):
            raise DamagedError("another rank can't load it, and says why")

    def _reduced(self, mine: bool, by: distributed.ReduceOp.RedOpType) -> bool:
        device = "cpu"
        if "gloo" not in str(distributed.get_backend()):  # not run on a GPU yet
            accelerator = torch.accelerator.current_accelerator()
            device = "cpu" if accelerator is None else accelerator.type
        word = torch.tensor([int(mine)], device=device)
        distributed.all_reduce(word, by)
        return bool(word.item())
