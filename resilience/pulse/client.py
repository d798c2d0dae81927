"""The in-loop calls: ``heartbeat``, ``section``, ``expect_heartbeats``, ``end_all_sections``, ``done``.

Rule: a call is a few stores into the rank's page; it can't block, and it never raises because of us. Without a launcher
the page is a private one that nobody watches, which is said once at debug level: misuse raises and ``@record`` knows the
step and the sections there too.

Hazard: after ``fork`` a child (a DataLoader worker) must not write its parent's page: the calls are no-ops there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
from collections.abc import Callable
from contextlib import ContextDecorator
from datetime import timedelta
from typing import Any, cast

from resilience import config
from resilience.errors import PulseError
from resilience.pulse import attach
from resilience.pulse.page import Page
from resilience.pulse.section import F, Section, marks_of
from resilience.pulse.stop import Stop
from resilience.pulse.writer import Pulse

Timeout = float | timedelta | None


class _Process:
    """This process's pulse, once it is known whether there is one."""

    def __init__(self) -> None:
        self.pulse: Pulse | None = None
        self.sections: dict[str, Section] = {}
        self.stop: Stop | None = None
        self._looked = False

    def look(self) -> Pulse | None:
        """Find the pulse on first use; afterwards answer from memory. ``None`` in a forked child only."""
        if not self._looked:
            self._looked = True
            page = attach.page_of_this_process()
            if page is None:
                logging.getLogger("resilience").debug(
                    "no launcher: nobody watches heartbeats and sections. Start the script with `resilience run` to be watched."
                )
                page = Page.private()
            self.pulse = Pulse(page)
            unled, alone = page.fd < 0, config.rank_environment().world < 2
            self.stop = Stop(page, alone=unled and alone, deaf=unled and not alone)
        return self.pulse

    def forget(self) -> None:
        """Let go of the page: it is the parent's. Sections that the script still holds become no-ops too."""
        if self.stop is not None:
            self.stop.forget()
            self.stop = None
        for known in self.sections.values():
            known.detach()
        self.pulse = None
        self.sections = {}
        self._looked = True


_here = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_here.forget)


def heartbeat(step: int | None = None) -> None:
    """Say that this rank is alive, and at which step.

    From the first heartbeat on they are expected to keep coming, until :func:`done` or the end of the script.
    """
    pulse = _here.pulse or _here.look()
    if pulse is not None:
        pulse.beat(step)


def done() -> None:
    """Say that no more heartbeats will come. What follows (a last save, teardown) has the long exit timeout."""
    pulse = _here.pulse or _here.look()
    if pulse is not None:
        pulse.unexpect()


class expect_heartbeats(ContextDecorator):  # noqa: N801 - reads as what it does
    """Expect heartbeats from here to the end of the block, the first one included.

    ``timeout`` is the longest time between two of them: seconds, a ``timedelta``, ``None`` for learned, ``math.inf``
    for none.
    """

    def __init__(self, timeout: Timeout = None) -> None:
        self._limit = seconds(timeout)
        self._pulses: list[Pulse | None] = []

    def __enter__(self) -> None:
        pulse = _here.pulse or _here.look()
        self._pulses.append(pulse)
        if pulse is not None:
            pulse.expect(self._limit)

    def __exit__(self, *error: object) -> None:
        pulse = self._pulses.pop()
        if pulse is not None and pulse is _here.pulse:
            pulse.relax()


def stop_requested() -> bool:
    """Whether to stop now: call it once per step, on every rank, and save and leave the loop when it is true.

    It turns true on all ranks at the same step after SIGTERM or SIGUSR1 to a launcher or to a rank. Handlers that you had for
    them when you call this first are called as well. It has to be called from the main thread. Under plain ``torchrun`` ranks
    can't agree, and it stays false; in a single process a signal is enough.
    """
    if _here.stop is None:
        _here.look()
    return _here.stop is not None and _here.stop.requested()


def listen_for_stop() -> Callable[[], bool]:
    """Take the signals of :func:`stop_requested` now, or again: a framework may have put handlers of its own in their place. Return
    what that calls, for as long as there is no other process."""
    if _here.stop is None:
        _here.look()
    if _here.stop is None:
        return stop_requested
    _here.stop.listen()
    return _here.stop.requested


def end_all_sections() -> None:
    """Close every open section. A ``with`` block that is still inside one leaves quietly later."""
    pulse = _here.pulse or _here.look()
    if pulse is not None:
        pulse.close_all()


def within(name: str, function: F) -> F:
    """Return ``function`` (plain or async) so that each call runs inside the section ``name``."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def inside_async(*args: Any, **kwargs: Any) -> Any:
            with section(name):
                return await function(*args, **kwargs)

        return cast(F, inside_async)

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with section(name):
            return function(*args, **kwargs)

    return cast(F, inside)


def section(name: str, timeout: Timeout = None) -> Section:
    """Return the section ``name``, as a context manager or a decorator.

    It is watched while it is open: ``timeout`` in seconds or as a ``timedelta``, ``None`` for learned, ``math.inf`` for
    none. A timeout holds for the name until another one is given. Sections nest, and every open one is judged. At most
    64 names per rank.
    """
    try:
        known = _here.sections.get(name)
    except TypeError:  # not even hashable
        known = None
    if known is None:
        if not isinstance(name, str):
            raise PulseError(
                f"section({name!r}): the name must be a string. Used as a decorator it is @section('name')."
            )
        pulse = _here.pulse or _here.look()
        known = _here.sections[name] = pulse.borrow(name) if pulse is not None else Section(name)
    if timeout is not None:
        known.limit(cast(float, seconds(timeout)))
    return known


def last_step() -> int | None:
    """Return the step of the last heartbeat that told one."""
    return _here.pulse.page.read().step if _here.pulse is not None else None


def open_sections() -> list[tuple[str, int]]:
    """Return the sections that are open now, in whatever thread, with when they were opened (CLOCK_MONOTONIC)."""
    rows = _here.pulse.page.read().open_rows() if _here.pulse is not None else []
    return [(row.name, row.open_since) for row in rows]


sections_left_by = marks_of


def resume() -> None:
    """Expect heartbeats again after :func:`done`. ``RankMonitorClient`` calls this when it is initialised once more."""
    pulse = _here.pulse or _here.look()
    if pulse is not None:
        pulse.again()


def finish() -> None:
    """Say that the script has returned. The trampoline calls this; scripts have no need to."""
    if _here.pulse is not None:
        _here.pulse.finish()


def seconds(timeout: Timeout) -> float | None:
    """Return a timeout in seconds (``None`` stays ``None``); raise for what can't be meant."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value <= 0:
        raise PulseError(
            f"timeout={timeout!r}: give positive seconds or a timedelta, None for learned, math.inf for none."
        )
    return float(value)
