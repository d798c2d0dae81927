"""A rank monitor: a loop around :func:`verdict` and :class:`Ladder`.

One process per rank, started once by the launcher, without torch. It holds its rank's page, a pidfd of the rank and one of
the launcher, and sleeps until the earliest deadline or ``workload_check_interval``, whichever is sooner.

1) ``attach``   (launcher) a rank was started: its page, pid, timeouts
2) ``status``   (monitor) what the rank taught us, at most once a second
3) ``hang``     (monitor) the verdict, with the rank's own testimony; the ladder waits
4) ``testify``  (launcher) asks every monitor for its rank's testimony, before anything is ended
5) ``end``      (launcher) up the ladder; the monitor goes on its own when this does not come in time
6) ``ended``    (monitor) the rank is gone and its session is swept

Hazard: if the launcher dies, nobody else is left to end the rank. So the launcher's pidfd is in the same poll, and its
death is an order to end.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from resilience.monitor import proc, stacks
from resilience.monitor.ladder import Ladder
from resilience.monitor.testimony import describe
from resilience.monitor.verdict import FINE, HANG, WARN, Life, Verdict, learned_from, verdict
from resilience.pulse import channel
from resilience.pulse.page import W_ENDING, Page, PageView
from resilience.pulse.timeouts import Timeouts, from_json, to_json

_S = 1_000_000_000
_STATUS_NS = _S
_ORPHAN_GRACE_S = 3.0
_DYING_S = 2.0
_LATE_NS = 2 * _S  # a monitor that wakes this much too late was itself stopped: its rank's clocks start anew


class Watch:
    """The rank that is being watched: what the launcher said about it, and how far we are with it."""

    def __init__(self, message: channel.Message, fds: list[int]) -> None:
        self.page = Page(fds[0])
        self.stacks_fd = fds[1]
        self.cycle: int = message["cycle"]
        self.rank: int = message["rank"]
        self.pid: int = message["pid"]
        self.started_ns: int = message["started_ns"]
        self.interval_ns = int(message["interval"] * _S)
        self.first_signal: int = message["first_signal"]
        self.grace_ns = int(message["grace"] * _S)
        self.testimony_s: float = message["testimony"]
        self.stack_signal: int = message["stack_signal"]
        self.timeouts = read_timeouts(message)
        self.adopted: bool = message["adopted"]
        state = proc.state_of(self.pid)
        self.started_ticks = state.started_ticks if state else -1
        try:
            self.pidfd: int | None = os.pidfd_open(self.pid)
        except OSError:
            self.pidfd = None  # it is gone already
        self.resumed_ns: int = message["resumed_ns"]
        self.warned = False
        self.next_ns: float = 0.0
        self._raw = b""
        self._last: tuple[PageView, Verdict]
        self.alarm_ns = 0
        self.testimony: dict[str, Any] | None = None  # what the rank said when it was found to hang
        self.ladder: Ladder | None = None

    def judge(self, now: int) -> tuple[PageView, Verdict]:
        """Judge the rank; a page that has not changed keeps its verdict until the next deadline."""
        raw = self.page.raw()
        if raw != self._raw or now >= self.next_ns:
            view = self.page.read()
            judged = verdict(view, self.timeouts, now, Life(self.started_ns, self.resumed_ns, self.adopted))
            self._raw, self._last, self.next_ns = raw, (view, judged), judged.next_ns
        return self._last

    def reconsider(self) -> None:
        """Judge anew at the next look: something else than the page has changed."""
        self._raw = b""

    def target(self) -> int:
        """The process to testify: the one that holds the page (with ``--no-python`` a child of the one we started)."""
        return self.page.read().pid or self.pid

    def close(self) -> None:
        self.page.close()
        os.close(self.stacks_fd)
        if self.pidfd is not None:
            os.close(self.pidfd)


class Monitor:
    """One monitor process."""

    def __init__(self, sock: socket.socket, launcher_pidfd: int, scratch: str) -> None:
        self.sock = sock
        self.launcher_pidfd = launcher_pidfd
        self.scratch = scratch
        self.watch: Watch | None = None
        self.status_ns = 0
        self.unsent: list[channel.Message] = []
        self.dismissed = False
        self.busy_ns = 0  # how long testimony may have kept us since the last turn
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        self.poll.register(launcher_pidfd, select.POLLIN)

    def run(self) -> None:
        """Loop until the launcher closes its end or dies."""
        awake = time.monotonic_ns()
        while True:
            wait_ms = self._sleep_ms(time.monotonic_ns())
            ready = {fd for fd, _ in self.poll.poll(wait_ms)}
            awake, before = (now := time.monotonic_ns()), awake
            if self.watch is not None and now - before > wait_ms * 1_000_000 + _LATE_NS + self.busy_ns:
                self.watch.resumed_ns = now
                self.watch.reconsider()
            self.busy_ns = 0
            if self.launcher_pidfd in ready:
                return self._orphaned()
            if self.sock.fileno() in ready and not self._hear():
                # Told to go, or the launcher is dying: its sockets close a moment before its death shows.
                return self._orphaned() if not self.dismissed and self._launcher_is_dying() else None
            watch = self.watch
            if watch is not None and (watch.pidfd is None or watch.pidfd in ready):
                self._rank_ended(watch)
            else:
                self._look(time.monotonic_ns())
            self._flush()

    def _sleep_ms(self, now: int) -> float:
        watch = self.watch
        if watch is None:
            return 1000.0
        until = watch.ladder.next_ns() if watch.ladder is not None else watch.alarm_ns or watch.next_ns
        return max(1.0, min(float(watch.interval_ns), until - now) / 1e6)

    def _hear(self) -> bool:
        """Take one message from the launcher; False when it closed its end."""
        try:
            received = channel.receive(self.sock)
        except OSError:
            return False
        if received is None:
            return False
        message, fds = received
        op, watch = message.get("op"), self.watch
        if op == "attach":
            self._detach()
            self.watch = Watch(message, fds)
            if self.watch.pidfd is not None:
                self.poll.register(self.watch.pidfd, select.POLLIN)
        elif op == "detach":
            self._detach()
        elif op == "quit":
            self.dismissed = True
            return False
        elif watch is None:
            if op == "testify":
                self._tell({"op": "testimony", "id": message["id"], "testimony": None})
        elif op == "limits":
            watch.timeouts, watch.adopted = read_timeouts(message), message["adopted"]
            watch.reconsider()
        elif op == "testify":
            self.busy_ns = 3 * _S
            self._tell({"op": "testimony", "id": message["id"], "testimony": testimony(watch)})
        elif op == "end" and watch.ladder is None:
            watch.ladder = Ladder(message["signal"], int(message["grace"] * _S))
        return True

    def _look(self, now: int) -> None:
        """Judge the rank, or climb the ladder if it is judged already."""
        watch = self.watch
        if watch is None:
            return self._ping(now, None)
        if watch.ladder is not None:
            return self._climb(watch, now)
        if watch.alarm_ns:
            if now >= watch.alarm_ns:  # nobody told us to end it: the launcher is stopped or busy
                watch.ladder = Ladder(watch.first_signal, watch.grace_ns)
            return None
        view, judged = watch.judge(now)
        if judged.kind == FINE or (judged.kind == WARN and watch.warned):
            return self._ping(now, view)
        clock = judged.clock
        assert clock is not None
        self.busy_ns = 3 * _S
        report: dict[str, Any] = {
            "op": judged.kind,
            "cycle": watch.cycle,
            "clock": clock.name,
            "age": (now - clock.since_ns) / _S,
            "timeout": clock.limit.seconds,
            "source": clock.limit.source,
            "warmup": clock.limit.warmup,
            "message": judged.message(now),
            "late": (now - clock.deadline_ns) / _S,
            "testimony": testimony(watch),
        }
        if judged.kind == HANG:
            watch.testimony = report["testimony"]
            watch.alarm_ns = now + int((watch.testimony_s + 2.0) * _S)
        else:
            watch.warned = True
        return self._tell(report)

    def _climb(self, watch: Watch, now: int) -> None:
        assert watch.ladder is not None
        signum, watch.ladder = watch.ladder.due(now)
        if signum is None:
            return
        watch.page.words[W_ENDING] = 1  # it is no request to stop
        proc.signal_group(watch.pid, watch.started_ticks, signum)
        state = proc.state_of(watch.pid)
        if signum != signal.SIGKILL and state is not None and state.state in "Tt":
            proc.signal_group(watch.pid, watch.started_ticks, signal.SIGCONT)

    def _rank_ended(self, watch: Watch) -> None:
        """The rank is gone. What it left in its session goes too, unless it ended by itself in good order."""
        view = watch.page.read()
        if watch.ladder is not None or (view.attached and not view.finishing_since):
            proc.sweep_session(watch.pid, watch.started_ticks)
        self._tell({"op": "ended", "cycle": watch.cycle, "learned": to_json(learned_from(view, watch.started_ns))})
        self._detach()

    def _ping(self, now: int, view: PageView | None) -> None:
        """Tell the launcher that we live, and what the rank taught us."""
        if now - self.status_ns < _STATUS_NS:
            return
        self.status_ns = now
        message: dict[str, Any] = {"op": "status"}
        watch = self.watch
        if watch is not None and view is not None:
            message |= {
                "cycle": watch.cycle,
                "adopted": view.adopted,
                "step": view.step,
                "learned": to_json(learned_from(view, watch.started_ns)),
            }
        self._tell(message)

    def _tell(self, message: channel.Message) -> None:
        """Send without ever waiting: a stopped launcher must not stop its monitors. What matters is kept for later."""
        if message["op"] != "status" or not self.unsent:
            self.unsent.append(message)
        self._flush()

    def _flush(self) -> None:
        while self.unsent:
            try:
                channel.send(self.sock, self.unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self.unsent.clear()
                return
            self.unsent.pop(0)

    def _detach(self) -> None:
        if self.watch is not None:
            if self.watch.pidfd is not None:
                self.poll.unregister(self.watch.pidfd)
            self.watch.close()
            self.watch = None

    def _launcher_is_dying(self) -> bool:
        return bool(select.select([self.launcher_pidfd], [], [], _DYING_S)[0])

    def _orphaned(self) -> None:
        """The launcher is dead: end the rank, take away what the launcher can't, and go."""
        watch = self.watch
        if watch is not None and watch.pidfd is not None:
            ladder = Ladder(signal.SIGTERM, int(_ORPHAN_GRACE_S * _S))
            give_up = time.monotonic_ns() + int((_ORPHAN_GRACE_S + 10) * _S)
            while not select.select([watch.pidfd], [], [], 0.05)[0] and time.monotonic_ns() < give_up:
                signum, ladder = ladder.due(time.monotonic_ns())
                if signum is not None:
                    watch.page.words[W_ENDING] = 1
                    proc.signal_group(watch.pid, watch.started_ticks, signum)
                    proc.signal_group(watch.pid, watch.started_ticks, signal.SIGCONT)
            proc.sweep_session(watch.pid, watch.started_ticks)
        for name in ("socket", "owner"):
            with contextlib.suppress(OSError):
                os.unlink(f"{self.scratch}/{name}")  # noqa: PTH108 - monitors import no pathlib
        with contextlib.suppress(OSError):
            os.rmdir(self.scratch)  # noqa: PTH106


def read_timeouts(message: channel.Message) -> Timeouts:
    """Read the timeouts out of an ``attach`` or ``limits`` message."""
    return Timeouts(
        given={name: (_seconds(value), source) for name, (value, source) in message["given"].items()},
        learned=from_json(message["learned"]),
        factor=message["factor"],
        floor=message["floor"],
        unlearned=_seconds(message["unlearned"]),
        learn_after=message["learn_after"],
    )


def _seconds(value: float | None) -> float:
    return math.inf if value is None else value


def testimony(watch: Watch) -> dict[str, Any]:
    """Have the rank testify. Where it is comes before its stacks: a stopped rank is continued for them, and moves on.

    After a verdict the testimony that belongs to it is given again: the rank may have moved on since.
    """
    if watch.testimony is not None:
        return watch.testimony
    state = proc.state_of(watch.pid)
    said = describe(
        watch.page,
        rank=watch.rank,
        pid=watch.pid,
        state=state.state if state else "gone",
        started_ns=watch.started_ns,
        now_ns=time.monotonic_ns(),
        stack="",
    )
    said["stack"] = stacks.collect(watch.target(), watch.stacks_fd, watch.stack_signal, min(2.0, watch.testimony_s))
    return said


def main(arguments: list[str]) -> None:
    """Run a monitor: ``SOCKET_FD LAUNCHER_PIDFD SCRATCH_DIR``."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its launcher, not before
    sock = socket.socket(fileno=int(arguments[0]))
    sock.setblocking(False)
    Monitor(sock, int(arguments[1]), arguments[2]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
