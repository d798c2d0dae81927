"""The actor that keeps a job on Ray going: a thin loop around :mod:`plan`.

It may be killed at any moment, and Ray restarts it: what it knows is in :mod:`memory` before it acts. Launchers do not notice.

Rule: only the newest life acts. Ray starts another where it has lost sight of one that may still run, and a job may be submitted
again meanwhile. So each life leaves its mark when it begins, and ends itself where it finds another's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray
from resilience.integrations.ray import claims, grace, memory
from resilience.integrations.ray.cluster import Hands
from resilience.integrations.ray.plan import Rules, decide
from resilience.integrations.ray.silence import SIGN_EVERY_S
from resilience.integrations.ray.spec import JobSpec
from resilience.integrations.ray.start import START_S, setup_s
from resilience.integrations.ray.state import State, news
from resilience.integrations.ray.stumbles import Stumbles, begun_anew, recovered, stumbled

_LOG = logging.getLogger("resilience.ray")
TICK_S = 0.5
BEGIN_S = 60.0  # so long a submitter waits for its first life to begin
_AFTER_A_MISTAKE_S = 2.0


def rules_of(spec: JobSpec) -> Rules:
    """Return what the plan needs to know of a spec."""
    rules = Rules(
        spec.name,
        spec.nodes,
        spec.min_nodes,
        spec.labels,
        max_failures=spec.max_failures,
        stop_grace_s=grace.of_spec(spec),
        join_s=float(spec.rendezvous.get("join_timeout", Rules.join_s)),
        bundle=spec.bundle,
    )
    if (groups := spec.groups) is None:
        return rules
    return dataclasses.replace(rules, label=groups.label, threshold_s=groups.threshold_s, size=groups.size)


class Supervisor:
    """Looks, decides, remembers, acts; until the job is over and nothing of it is left."""

    def __init__(self, name: str, token: str, driver: str, *spec: str) -> None:
        # Nothing here may fail: an actor that raises while it is made is not made again.
        self._name, self._submission = name, memory.Submission("".join(spec), token, driver)
        self._mark = f"{token}/{uuid.uuid4().hex}"
        self._begun = threading.Event()
        self._stumbles = Stumbles()
        self._signed_at = 0.0
        threading.Thread(target=self._run, name="resilience-supervisor", daemon=True).start()

    def ready(self) -> str:
        """Wait until it has begun. Return why it has not, if that takes long; else nothing."""
        return "" if self._begun.wait(BEGIN_S) else self._stumbles.words or f"it has not begun after {BEGIN_S:g} s"

    def _run(self) -> None:
        state: State | None = None
        while True:
            try:
                if not self._begun.is_set():
                    self._begin()
                    self._begun.set()
                self._sign()
                state, done = self._step(memory.recall(self._name) if state is None else state)
                if done:
                    break
                self._hands.wait(TICK_S)
                if self._stumbles.over(time.monotonic()):
                    self._stumbles, state = Stumbles(), recovered(state)
                    memory.save(self._name, state)
            except Exception as error:  # noqa: BLE001 - a call that Ray refuses now may work a moment later
                self._stumble(error)
                state = None  # what is written down counts
        self._end()

    def _begin(self) -> None:
        """Begin a life: leave its mark, and go on from what the one before has left."""
        self._spec = JobSpec.from_text(self._submission.spec)
        self._rules = dataclasses.replace(rules_of(self._spec), start_s=START_S + setup_s(_runtime_env()))
        self._hands = Hands(self._spec, self._submission)
        # It warns that actors end with their placement group: they should.
        logging.getLogger("ray.actor").setLevel(logging.ERROR)
        if _own_id() not in (None, _id_of_the_named(self._name)):
            leave(f"job {self._name}: its name is another one's by now")
        memory.begin_life(self._name, self._mark)
        # The first life: it has the name, so the entry is its own.
        if not memory.is_open_for(self._name, self._submission):
            memory.open_entry(self._name, self._submission)
        left = memory.recall(self._name)
        if (state := begun_anew(recovered(left), time.time())) != left:
            memory.save(self._name, state)

    def _heed_the_newest(self) -> None:
        """End this process where there is a newer life, or a newer submission: what there is is theirs."""
        if memory.newest_life(self._name) not in (self._mark, ""):
            leave(f"job {self._name}: another supervisor looks after it by now")

    def _end(self) -> None:
        """End this actor for good. Where that does not work its process ends, and the next life tries again."""
        for _ in range(3):
            with contextlib.suppress(Exception):
                if _own_id() in (None, _id_of_the_named(self._name)):
                    ray.kill(ray.get_actor(self._name, namespace=memory.NAMESPACE), no_restart=True)
                    return
            time.sleep(_AFTER_A_MISTAKE_S)
        leave(f"job {self._name}: it is over, and its supervisor can't end itself as Ray wants it")

    def _sign(self) -> None:
        """Leave a sign of life, where it is time for one. Only the loop does: actor threads would answer though it is stuck."""
        if time.monotonic() - self._signed_at >= SIGN_EVERY_S:
            memory.sign(self._name)
            self._signed_at = time.monotonic()

    def _stumble(self, error: Exception) -> None:
        """Begin again from what is remembered, and have the status say what is wrong."""
        self._stumbles = self._stumbles.and_one_more(error, time.monotonic())
        if self._stumbles.number == 1:  # all of it goes to the submitter's console
            sys.stderr.write(f"resilience: job {self._name}: the supervisor stumbles: {self._stumbles.words}\n")
        _LOG.debug("job %r: the supervisor stumbles", self._name, exc_info=error)
        time.sleep(_AFTER_A_MISTAKE_S)
        if not self._begun.is_set():
            return
        self._hands = Hands(self._spec, self._submission)
        try:
            self._heed_the_newest()
            stop = memory.stop_asked(self._name, self._submission.token)
            left, grace_s = memory.recall(self._name), self._rules.stop_grace_s
            memory.save(self._name, stumbled(left, self._stumbles, time.time(), stop=stop, grace_s=grace_s))
        except Exception:  # noqa: BLE001 - the cluster's store may be what is out of reach
            _LOG.debug("job %r: that can't be noted", self._name, exc_info=True)

    def _step(self, state: State) -> tuple[State, bool]:
        # One that is over has nothing to be looked at, and is cleared away though looking may be what fails.
        after = state if state.phase.over else decide(self._rules, state, self._hands.look(state), time.time())
        self._heed_the_newest()
        if after != state:
            memory.save(self._name, after)
            for line in news(state.lines, after.lines):
                sys.stdout.write(f"resilience [job {self._name}] {line.partition(' ')[2]}\n")
            sys.stdout.flush()
        clean, made = self._hands.make_so(after, self._sign)
        if made:
            self._heed_the_newest()  # that may have taken long
            after = claims.made(after, made, time.time())
            memory.save(self._name, after)
        return after, after.phase.over and clean


def leave(why: str) -> None:
    """End this process, and touch nothing. An actor that Ray still wants is started again."""
    sys.stderr.write(f"resilience: {why}; this one ends\n")
    sys.stderr.flush()
    os._exit(1)


def _own_id() -> str | None:
    """Return the id of the actor that this process is, if it is one."""
    return ray.get_runtime_context().get_actor_id()


def _id_of_the_named(name: str) -> str:
    """Return the id of the actor that has the job's name. Raises ``ValueError`` where none has."""
    return str(ray.get_actor(name, namespace=memory.NAMESPACE)._actor_id.hex())


def _runtime_env() -> Mapping[str, Any]:
    return dict(ray.get_runtime_context().runtime_env)
