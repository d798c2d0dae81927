"""Whether a step of training went wrong, and how far to go back for it. Pure.

NaN and infinity are wrong at once. A spike is a figure that is both far above what is usual (in deviations from the median of
the last few steps, taken robustly and, where all figures are positive, of their logarithms: the noise of losses and norms is a
matter of ratios) and twice the largest of all that are remembered. The second keeps tasks of different scale that take turns, and
hard batches, from being alarms. Figures that fall are never wrong, so neither a warm-up nor a schedule is. What creeps up over as
many steps as are remembered is not a spike, and is not found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

_ROBUST = 1.4826  # median absolute deviations in a standard deviation, of what is normally distributed
_LEAST = 2.0  # times the largest that is remembered
_RECENT = 32  # steps that say what is usual
_MOST_SKIPS = 16  # updates in a row: a gradient scaler that looks for its scale needs about as many
Past = Mapping[str, Sequence[float]]


class Verdict(IntEnum):
    """What to do after a step. Of what several ranks say the largest counts."""

    OK = 0
    SKIP = 1  # leave this update out
    ROLL_BACK = 2


@dataclass(frozen=True)
class Rules:
    """When a step is bad. ``spike``: so many robust deviations, ``None``: spikes are not looked for; ``window``: good steps that
    are remembered; ``warmup``: so many of them come first; ``skip_nan``: leave the update out, if that is still possible."""

    spike: float | None = 10.0
    window: int = 128
    warmup: int = 64
    skip_nan: bool = False


def verdict(past: Past, figures: Mapping[str, float], rules: Rules, skipped: int = 0) -> tuple[Verdict, str]:
    """Judge the figures of a step by those of good ones; say why. ``skipped``: updates that were left out right before."""
    wrong = [f"{name} {value:g}" for name, value in figures.items() if not math.isfinite(value)]
    if wrong:
        skip = rules.skip_nan and skipped < _MOST_SKIPS
        return (Verdict.SKIP if skip else Verdict.ROLL_BACK), ", ".join(wrong)
    if rules.spike is not None:
        for name, value in figures.items():
            usual = past.get(name, ())
            if len(usual) >= rules.warmup and is_spike(usual, value, rules.spike):
                return Verdict.ROLL_BACK, f"{name} {value:g}, of late {_median(list(usual)[-_RECENT:]):g}"
    return Verdict.OK, ""


def is_spike(usual: Sequence[float], value: float, deviations: float) -> bool:
    """Whether a figure is far above what is usual."""
    largest, positive = max(usual), min(usual) > 0
    if value <= (_LEAST * largest if positive else largest):
        return False
    recent = list(usual)[-_RECENT:]
    middle = _median(recent)
    if positive:
        spread = _median([abs(math.log(it / middle)) for it in recent])
        return math.log(value / middle) > deviations * _ROBUST * spread
    spread = _median([abs(it - middle) for it in recent])
    if spread == 0:  # constant so far: there is no scale to go by
        return False
    return value - middle > max(deviations * _ROBUST * spread, _LEAST * (largest - middle))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True)
class Trouble:
    """What went wrong of late: how often in a row, how often in the same place, where that was and where we went back to."""

    row: int = 0
    again: int = 0
    step: int = -1
    batch: int = -1
    back_at: int = -1

    def bad(self, step: int, batch: int) -> Trouble:
        """A step is bad. It is the same place unless training came past the last bad one in between."""
        again = self.again + 1 if self.row and step <= self.step else 0
        return replace(self, row=self.row + 1, again=again, step=max(step, self.step), batch=max(batch, self.batch))

    def good(self, batch: int, patience: int) -> Trouble:
        """A step is good. So many batches after the last bad one all is forgotten."""
        return Trouble() if self.row and batch > self.batch + patience else self

    def went_back(self, step: int) -> Trouble:
        """Everybody is back at the end of a step."""
        return replace(self, back_at=step)
