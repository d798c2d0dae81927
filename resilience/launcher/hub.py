"""The launcher's ear: one thread that hears all monitors and workers of this node.

It starts the monitors and starts a new one where one died or was stopped, hands each worker its page, merges what the
ranks teach, and carries the launcher's two requests: :meth:`Hub.testify` and :meth:`Hub.end_ranks`. Both have deadlines.

Hazard: the agent's main thread may be stuck in a store call. Everything here works without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience.config import Settings
from resilience.failover.sentence import SHUTDOWN_WORKLOAD
from resilience.launcher.bell import Bell
from resilience.launcher.brakes import Brakes
from resilience.launcher.desk import Desk
from resilience.launcher.learner import Learner
from resilience.launcher.post import Post
from resilience.launcher.vault import Vault
from resilience.monitor import proc
from resilience.pulse import channel
from resilience.pulse.attach import STACK_SIGNAL
from resilience.pulse.page import FLAG_ADOPTED, W_FLAGS
from resilience.pulse.timeouts import Limit, from_json

_LOG = logging.getLogger("resilience.launcher")
_SILENT_S = 15.0  # a monitor that said nothing for this long is stopped or broken: it is replaced
_LIMITS_EVERY_S = 1.0
_TURN_S = 0.5
_LATE_S = 2.0
_QUIET_MONITOR_S = 2.5  # they say something every second; one that has not is not trusted with a signal


class Hub:
    """All monitors and pages of one node."""

    def __init__(self, settings: Settings, ranks: int, scratch: Path) -> None:
        self.settings = settings
        self.learner = Learner(settings)
        self._scratch = scratch
        self._posts = [Post(local_rank) for local_rank in range(ranks)]
        self._changed = threading.Condition()
        self.brakes = Brakes(self._posts, self._changed)
        self._closing = False
        self._limits_stale = False
        self._limits_sent = 0.0
        self._requests = 0
        self.bell = Bell()  # rung when the agent has something to look at
        self._resumed_ns = 0
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._hear_nothing)
        self.socket_path = str(scratch / "socket")
        self._launcher_pidfd = os.pidfd_open(os.getpid())
        for post in self._posts:  # before anything else: from here on somebody cleans up after us
            self._start_monitor(post)
        self._vault = Vault(scratch, self._selector)
        self._desk = Desk(
            self.socket_path,
            self._selector,
            posts=self._posts,
            learner=self.learner,
            learned=self._limits_changed,
            requested=self.bell.ring,
            saver=self._vault.address,
        )
        self._thread = threading.Thread(target=self._run, name="resilience-hub", daemon=True)
        self._thread.start()

    # -- what the agent asks for --------------------------------------------------------------------------------

    def prepare(self, cycle: int, ranks: list[int]) -> None:
        """Make fresh pages for the ranks (by local rank) that are about to be started."""
        with self._changed:
            for post, rank in zip(self._posts, ranks, strict=True):
                post.renew(cycle, rank)

    def attach(self, pids: dict[int, int]) -> None:
        """Set the monitors on the ranks that were just started, by local rank."""
        with self._changed:
            for post in self._posts:
                post.pid = pids[post.local_rank]
                state = proc.state_of(post.pid)
                post.started_ticks = state.started_ticks if state else -1
                self._attach(post)

    def hangs(self) -> dict[int, dict[str, Any]]:
        """Return the verdicts of this cycle, by rank."""
        with self._changed:
            return {post.rank: post.hang for post in self._posts if post.hang is not None}

    def ended_at(self) -> dict[int, int]:
        """Return when ranks of this cycle ended, as their monitors saw it."""
        with self._changed:
            return {post.rank: post.ended_ns for post in self._posts if post.ended_ns}

    def step(self) -> int | None:
        """Return the highest step that a rank of this node told."""
        with self._changed:
            return max((post.step for post in self._posts if post.step is not None), default=None)

    def adopted(self) -> bool:
        """Whether a rank of this job has ever called us. The pages know it before the monitors tell."""
        with self._changed:
            pages = [post.page for post in self._posts if post.page is not None]
            return self.learner.adopted or any(page.words[W_FLAGS] & FLAG_ADOPTED for page in pages)

    def request(self) -> dict[str, Any] | None:
        """Return what a rank of this cycle asked the launcher for, if anything."""
        with self._changed:
            found = [post.request for post in self._posts if post.request is not None]
            return max(found, key=lambda item: item["action"] == SHUTDOWN_WORKLOAD, default=None)

    def pids(self) -> dict[int, int]:
        """Return the pids of this cycle, by rank."""
        with self._changed:
            return {post.rank: post.pid for post in self._posts}

    def testify(self, timeout: float) -> list[dict[str, Any]]:
        """Return the testimony of every rank of this node. For one that is dead, or does not answer in time, it is what its
        page says, without a stack."""
        with self._changed:
            self._requests += 1
            request = self._requests
            asked = [post for post in self._posts if post.alive() and post.sock is not None]
            for post in asked:
                self._tell(post, {"op": "testify", "id": request})
            self._changed.wait_for(lambda: all(post.answered >= request or not post.alive() for post in asked), timeout)
            answers = [post.testimony if post.answered >= request else None for post in self._posts]
            found = [answer or post.last_known() for answer, post in zip(answers, self._posts, strict=True)]
            return [item for item in found if item is not None]

    def end_ranks(self, signum: int, grace: float, patience: float = 5.0) -> bool:
        """End every rank of this node: ``signum``, after ``grace`` SIGKILL. Returns when all are gone, or gives up on a
        rank that even SIGKILL does not end (it is in the kernel), says so and returns False."""
        self.brakes.announce_the_end()
        with self._changed:
            for post in self._posts:
                if post.alive():
                    self._tell(post, {"op": "end", "signal": int(signum), "grace": grace})
                    if post.sock is None or time.monotonic() - post.heard > _QUIET_MONITOR_S:
                        proc.signal_group(post.pid, post.started_ticks, signum)
            gone = self._wait_gone(grace + 1.0)
            for post in self._posts:
                if not post.alive() and post.pid:
                    proc.sweep_session(post.pid, post.started_ticks)
            if gone:
                return True
            for post in self._posts:  # a monitor that is stopped or dead does not climb: we do
                if post.alive():
                    proc.signal_group(post.pid, post.started_ticks, signal.SIGKILL)
                    proc.sweep_session(post.pid, post.started_ticks)
            if not self._wait_gone(patience):
                stuck = [post.rank for post in self._posts if post.alive()]
                _LOG.error("ranks %s did not end at SIGKILL; they hang in the kernel and are left behind.", stuck)
                return False
            return True

    def _wait_gone(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while any(post.alive() for post in self._posts):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, 0.02))
        return True

    def close(self) -> None:
        """End the monitors and the thread. The ranks must be gone."""
        with self._changed:
            self._closing = True
            for post in self._posts:
                self._tell(post, {"op": "quit"})
        self._wake()
        self._thread.join(5.0)
        self._vault.close()
        for post in self._posts:
            post.close()
        self._desk.close()
        self._wake_r.close()
        self._wake_w.close()
        os.close(self._launcher_pidfd)
        self._selector.close()

    def learn(self, table: Any) -> None:
        """Take in what other nodes have learned."""
        with self._changed:
            if self.learner.merge(from_json(table)):
                self._limits_stale = True

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            before = time.monotonic()
            ready = self._selector.select(_TURN_S)
            if time.monotonic() - before > _TURN_S + _LATE_S:
                self._come_back()
            for key, _ in ready:
                self._guarded(lambda key=key: key.data(key.fileobj))  # type: ignore[misc]
            self._guarded(self._look_after_monitors)
            self._guarded(self._desk.look_after)
            self._guarded(self._vault.look_after)
            self._guarded(self._send_limits)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do one thing under the lock. This is a thread's boundary: one bad message, or no memory for a process, must not
        deafen the launcher for good."""
        with self._changed:
            try:
                act()
            except Exception:  # noqa: BLE001
                _LOG.exception("something went wrong beside the workers; it is tried again")
            self._changed.notify_all()

    def _come_back(self) -> None:
        """We were stopped or frozen, and so perhaps was everybody: nobody is late by that."""
        with self._changed:
            self._resumed_ns = time.monotonic_ns()
            for post in self._posts:
                post.heard = time.monotonic()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_w.send(b"x")

    def _hear_nothing(self, sock: socket.socket) -> None:
        sock.recv(64)

    # -- monitors -------------------------------------------------------------------------------------------------

    def _start_monitor(self, post: Post) -> None:
        ours, theirs = channel.pair()
        boot = Path(proc.__file__).with_name("__main__.py")
        command = [
            sys.executable,
            "-I",
            "-S",
            str(boot),
            str(theirs.fileno()),
            str(self._launcher_pidfd),
            str(self._scratch),
        ]
        try:
            post.process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), self._launcher_pidfd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        post.sock = ours
        post.heard = time.monotonic()
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._hear_monitor(post))

    def _attach(self, post: Post) -> None:
        if post.page is None or not post.alive():
            return
        config = self.settings.monitor
        message = {
            "op": "attach",
            "cycle": post.cycle,
            "rank": post.rank,
            "pid": post.pid,
            "started_ns": post.started_ns,
            "resumed_ns": self._resumed_ns,
            "interval": config.workload_check_interval,
            "first_signal": int(config.rank_termination_signal),
            "grace": config.rank_term_timeout,
            "testimony": config.testimony_timeout,
            "stack_signal": STACK_SIGNAL,
            **self.learner.message(),
        }
        self._tell(post, message, (post.page.fd, post.stacks_fd))

    def _hear_monitor(self, post: Post) -> None:
        assert post.sock is not None
        try:
            received = channel.receive(post.sock)
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            self._lose_monitor(post)
            return
        message, _ = received
        post.heard = time.monotonic()
        op = message.get("op")
        if op == "testimony":
            post.testimony, post.answered = message["testimony"], message["id"]
        if message.get("cycle") != post.cycle:
            return
        if message.get("adopted") and not self.learner.adopted:
            self.learner.adopted = self._limits_stale = True
        if message.get("step") is not None:
            post.step = message["step"]
        if "learned" in message and self.learner.see((post.cycle, post.rank), from_json(message["learned"])):
            self._limits_stale = True
        if op == "ended":
            post.ended_ns = time.monotonic_ns()
            self.bell.ring()
        elif op == "hang":
            post.hang = message
            self.bell.ring()
            self.learner.alarm(message["clock"], Limit(message["timeout"], message["source"], message["warmup"]))
        elif op == "warn":
            _LOG.warning(
                "rank %s: %s. It never called resilience, so it is left alone; its stacks:\n%s\n"
                "To have such a rank ended, give --ft-initial-rank-heartbeat-timeout.",
                post.rank,
                message["message"],
                message["testimony"]["stack"],
            )

    def _lose_monitor(self, post: Post) -> None:
        assert post.sock is not None
        self._selector.unregister(post.sock)
        post.sock.close()
        post.sock = None

    def _look_after_monitors(self) -> None:
        for post in self._posts:
            if self._closing:
                return
            process = post.process
            if process is not None and post.sock is not None and time.monotonic() - post.heard > _SILENT_S:
                _LOG.warning(
                    "the monitor of rank %s (pid %s) does not answer; it is replaced.",
                    post.rank,
                    process.pid,
                )
                process.kill()  # before its line is cut, which it could take for our death
                self._lose_monitor(post)
            if post.sock is None and process is not None:
                process.kill()
                process.wait()
                self._start_monitor(post)
                self._attach(post)
                _LOG.warning("the monitor of rank %s ended (%s); a new one was started.", post.rank, process.returncode)

    def _limits_changed(self) -> None:
        self._limits_stale = True

    def _send_limits(self) -> None:
        if self._limits_stale and time.monotonic() - self._limits_sent >= _LIMITS_EVERY_S:
            self._limits_stale = False
            self._limits_sent = time.monotonic()
            message = {"op": "limits", **self.learner.message()}
            for post in self._posts:
                self._tell(post, message)

    def _tell(self, post: Post, message: channel.Message, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting: a stopped monitor must not stop the launcher."""
        if post.sock is not None:
            with contextlib.suppress(OSError):
                channel.send(post.sock, message, fds)
