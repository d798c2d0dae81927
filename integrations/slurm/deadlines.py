"""How long a step is waited for whose end is due, though a launcher of it hangs, or ``srun``. Pure: time is passed in.

Rule: nobody is hurried before the grace is over that launchers have to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilience.integrations.slurm import chain
from resilience.integrations.slurm.start import Options

from resilience.failover import exits
from resilience.failover.ends import NodeEnd

MARGIN_S = 30.0  # beyond the grace that launchers have to stop
# The same where none has said anything. Slurm signals that grace and 30 s before the time is up (values.MARGIN_S): what is left of
# them is for ending the step, and for the requeue.
SILENT_S = 20.0
_NO_STOP = (*chain.LEFT, exits.FAILED)  # a node that is out was so before; a spare, which waits, ends with 1 at once


@dataclass
class Deadlines:
    """Since when it is settled how this start of the job ends, and since when its launchers have to stop."""

    options: Options
    _settled: float | None = None
    _asked: float | None = None

    def overdue(self, found: Sequence[NodeEnd], asked: bool, now: float) -> str:
        """Return why the step is to be ended, in words; empty where there is time. ``asked``: the launchers have to stop."""
        options, grace = self.options, self.options.grace
        is_settled = chain.settled(found, options.nodes, options.needed, options.most)
        self._settled = _since(self._settled, is_settled, now)
        self._asked = _since(self._asked, asked, now)
        stops = self._asked if found else None  # once it is asked to stop, the first word settles it, however late
        if any(since is not None and now - since > grace + MARGIN_S for since in (self._settled, stops)):
            return f"what follows is settled, and {self._missing(found)}"
        stopped = any(end.code not in _NO_STOP for end in found)
        if self._asked is not None and not stopped and now - self._asked > grace + SILENT_S:
            return f"the launchers were asked to stop {now - self._asked:.0f} s ago, and none says that it has"
        return ""

    def _missing(self, found: Sequence[NodeEnd]) -> str:
        silent = sorted(set(self.options.names) - {end.node for end in found})
        if len(found) >= self.options.nodes:
            return "srun does not end"
        return f"{', '.join(silent) or 'a launcher'} does not say how it ended"


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return None if not holds else now if before is None else before
