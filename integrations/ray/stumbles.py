"""What a job does when its supervisor can't do what is wanted, again and again: pure.

Rule: whatever trains goes on; only a job that has not begun ends for it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from resilience.integrations.ray.plan import ENDING_S, MARGIN_S, over
from resilience.integrations.ray.state import STOP_ASKED, STUMBLES, Phase, State, noted

from resilience.failover import exits

MOST = 60  # in a row, with the same words
CALM_S = 25.0  # without one, and they are over: an answer that raises may take 20 s to come
_LONGEST = 300


@dataclass(frozen=True)
class Stumbles:
    """So many in a row with the same words, the last one at ``at``."""

    words: str = ""
    number: int = 0
    at: float = 0.0

    def over(self, now: float) -> bool:
        """Return whether there were any, and for a while there was none: one good moment between two is none."""
        return bool(self.number) and now - self.at > CALM_S

    def and_one_more(self, error: BaseException, now: float) -> Stumbles:
        """Count another."""
        lines = str(error).strip().splitlines() or [""]
        words = f"{type(error).__name__}: {lines[-1]}"[:_LONGEST]
        return Stumbles(words, self.number + 1 if words == self.words else 1, now)


def stumbled(state: State, stumbles: Stumbles, now: float, *, stop: bool = False, grace_s: float = math.inf) -> State:
    """Return a job's state after a stumble: it says so, and ends where nothing has begun and nothing changes.

    ``stop``: it was asked for, which nobody else may get to hear. ``grace_s``: that launchers have then.
    """
    if state.phase in (Phase.STOPPING, Phase.ENDING):
        patience_s = ENDING_S if state.phase is Phase.ENDING else max(grace_s, state.grace_s) + MARGIN_S
        return _wound_up(state, stumbles, now, patience_s)
    if state.phase.over:
        return state
    state = listening_again(state)
    reason = f"{STUMBLES}{stumbles.words}; it tries again"
    if stop:
        state = dataclasses.replace(state, phase=Phase.STOPPING, since=now, reason=STOP_ASKED)
        return noted(state, now, reason)
    if state.launches or stumbles.number < MOST:
        return noted(dataclasses.replace(state, reason=reason), now, reason)
    reason = f"nothing was started: the supervisor stumbled {stumbles.number} times in a row: {stumbles.words}"
    return dataclasses.replace(
        state, phase=Phase.ENDING, since=now, outcome=Phase.FAILED, exit_code=exits.FAILED, reason=reason
    )


def _wound_up(state: State, stumbles: Stumbles, now: float, patience_s: float) -> State:
    """Return the state of a job that ends, and has ended where nobody could look for so long whether its launchers have: they are
    ended now. It keeps its reason: nothing would bring it back."""
    if now - state.since > patience_s and now >= state.fenced_at:
        outcome = (
            (Phase.STOPPED, exits.PREEMPTED) if state.phase is Phase.STOPPING else (state.outcome, state.exit_code)
        )
        return over(state, outcome[0] or Phase.FAILED, outcome[1], state.reason, now)
    said = noted(state, now, f"{STUMBLES}{stumbles.words}; it tries again")
    return listening_again(said) if state.phase is Phase.STOPPING else state


def recovered(state: State) -> State:
    """Return a job's state once the stumbles are over."""
    return dataclasses.replace(state, reason="") if state.reason.startswith(STUMBLES) else state


def begun_anew(state: State, now: float) -> State:
    """Return a job's state for another life of its supervisor. It does not know which launchers have been asked to stop: they have
    their whole grace from now on."""
    since = now if state.phase is Phase.STOPPING else state.since
    return listening_again(dataclasses.replace(state, since=since))


def listening_again(state: State) -> State:
    """Return a job's state for whoever has not listened to its actors for a while: their silence meanwhile is not theirs."""
    return dataclasses.replace(state, slots=tuple(dataclasses.replace(slot, mute_at=0.0) for slot in state.slots))
