"""What there is to say about a rank: where it is, since when, and its stacks.

Plain JSON from the start: it crosses from monitor to launcher to other nodes to the report.
"""

from __future__ import annotations

from typing import Any

from resilience.pulse.page import Page, PageView

_S = 1_000_000_000
_EVENTS = 16


def describe(
    page: Page, *, rank: int, pid: int, state: str, started_ns: int, now_ns: int, stack: str
) -> dict[str, Any]:
    """Return a rank's testimony. The page outlives the rank, so this works for a dead one too (``state`` "gone")."""
    view = page.read()
    return {
        "rank": rank,
        "pid": view.pid or pid,
        "state": state,
        "adopted": view.adopted,
        "attached": view.attached,
        "step": view.step,
        "beats": view.beats,
        "beat_age": (now_ns - view.beat_at) / _S if view.beat_at else None,
        "quiet": (now_ns - _last_sign(view, started_ns)) / _S,
        "sign_ns": _last_sign(view, started_ns),
        "sections": [{"name": row.name, "age_s": round((now_ns - row.open_since) / _S, 3)} for row in view.open_rows()],
        "entries": _entries(view),
        "finishing": bool(view.finishing_since),
        "in_flight": bool(view.in_flight),
        "stop_calls": view.stop_calls,
        "events": [[round(at, 4), what, name] for at, what, name in page.last_events()[-_EVENTS:]],
        "stack": stack,
    }


def _last_sign(view: PageView, started_ns: int) -> int:
    moments = [started_ns, view.beat_at, view.expected_since, view.done_since]
    moments += [max(row.open_since, row.closed_at) for row in view.rows]
    return max(moments)


def _entries(view: PageView) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in view.rows:
        counts[row.name] = counts.get(row.name, 0) + row.entries
    return counts
