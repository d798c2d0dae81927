"""A job on Ray, as its submitter has it: submit, wait, status, stop; and the way back to one from another program."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import socket
import time
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

from resilience.integrations.ray.silence import Silence
from resilience.integrations.ray.spec import JobSpec, is_name
from resilience.integrations.ray.start import setup_s
from resilience.integrations.ray.state import State
from resilience.integrations.ray.status import JobStatus, RayJobError, status_of

from resilience.errors import nearest

_LOG = logging.getLogger("resilience.ray")
_LOOK_S = 0.2
_MISSED_S = 10.0
_READY_S = 120.0
_REACH_S = 15.0
# On the cluster's head, which is not lost without the cluster. An affinity would not do: where nothing is reserved Ray takes it for
# a hint.
_AT_HOME = {"node:__internal_head__": 0.001}
# Ray keeps a larger argument with the program that gave it: an actor can't be started again when that has ended.
_PIECE = 50_000


class _OvertakenError(RayJobError):
    """Another job has the name by now."""


class Job:
    """One job, by its spec and its name.

    1) ``submit()``  once; returns when its supervisor runs
    2) ``status()``, ``wait()``, ``stop()``  at any time, from any program (:func:`attach`)

    Where this program is not connected to a cluster, ``submit()`` connects it as ``ray.init()`` does, which starts one where there
    is none; the others connect only to one that is there.
    """

    def __init__(self, spec: JobSpec, token: str = "") -> None:
        self.spec = spec
        self._token = token  # of the submission that is meant, once one is
        self._begun = bool(token)  # it has been seen in the cluster's store

    @property
    def name(self) -> str:
        """Return the name by which it is found."""
        return self.spec.name

    def submit(self) -> Job:
        """Have it run on the cluster that this program is connected to; connects as ``ray.init()`` does where it is not.

        Raises :class:`RayJobError` where a job of that name runs, and where its supervisor can't.
        """
        ray = _ray()
        if not ray.is_initialized():
            ray.init()
        from resilience.integrations.ray.supervisor import Supervisor  # noqa: PLC0415 - needs Ray

        memory = _memory()
        _await_gone(ray, self.name)
        driver = "" if self.spec.detached else str(ray.get_runtime_context().get_job_id())
        token = uuid.uuid4().hex[:8]
        patience = _READY_S + setup_s(dict(ray.get_runtime_context().runtime_env))
        try:  # whoever gets the name has the job: nothing is written before that, and then by the supervisor itself
            supervisor = (
                ray.remote(Supervisor)
                .options(
                    name=self.name,
                    namespace=memory.NAMESPACE,
                    lifetime="detached",
                    max_restarts=-1,
                    num_cpus=0,
                    max_concurrency=4,
                    resources=_AT_HOME,
                )
                .remote(self.name, token, driver, *_pieces(self.spec.as_text()))
            )
        except ray.exceptions.ActorAlreadyExistsError:
            raise _taken(self.name, "submitted") from None
        self._token, self._begun = token, False
        self._await_supervisor(ray, supervisor, patience)
        self._begun = True
        return self

    def _await_supervisor(self, ray: Any, supervisor: Any, patience: float) -> None:
        """Wait until it runs. One that can't is ended: nothing was started, and its name is free again."""
        from resilience.integrations.ray.cluster import said_of  # noqa: PLC0415 - needs Ray

        try:
            why = str(ray.get(supervisor.ready.remote(), timeout=None if math.isinf(patience) else patience))
        except ray.exceptions.GetTimeoutError:
            raise RayJobError(
                f"job {self.name!r} was submitted, and its supervisor does not run after {patience:g} s: Ray has not started it "
                f"(`ray status`, `ray list actors`). It runs as soon as Ray does, and wait() waits for it."
            ) from None
        except ray.exceptions.RayError as error:
            why = said_of(error)
        if why:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(supervisor, no_restart=True)
            raise RayJobError(
                f"job {self.name!r} was not started: its supervisor, an actor on the head node, can't run there: {why}. "
                "The head node needs the same packages as this program, and what its runtime_env names."
            )

    def status(self) -> JobStatus:
        """Return how it stands. Raises :class:`RayJobError` where another job has its name by now."""
        _connected()
        if not self._is_open():
            return status_of(self.name, State(reason="Ray has not started its supervisor yet"))
        state = _read(self.name, _memory().load)
        if state is None:
            raise RayJobError(f"job {self.name!r} was not submitted to this cluster.")
        sign = _memory().last_sign(self.name)
        return status_of(self.name, state, 0.0 if sign is None else time.time() - sign)

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until it is over, and everything that it had is given back; return how it ended. Raises ``TimeoutError``.

        A supervisor that hangs meanwhile is ended, so that Ray restarts it. Raises :class:`RayJobError` where another job has taken
        the name meanwhile: how this one ended is not known then.
        """
        _check_timeout(timeout)
        ray = _connected()
        self._bind()
        silence = Silence(time.monotonic())
        deadline = None if timeout is None else time.monotonic() + timeout
        missed_since: float | None = None
        over: JobStatus | None = None
        while True:
            try:
                status = self.status()
            except _OvertakenError:
                if over is None:
                    raise
                return over
            over = status if status.over else over  # whatever follows is another job's
            supervisor = _supervisor(ray, self.name)
            there = supervisor is not None
            if status.over and not there:
                return status
            if there:
                self._have_it_alive(ray, supervisor, silence)
            now = time.monotonic()
            missed_since = None if there else missed_since or now
            if missed_since is not None and now - missed_since > _MISSED_S:
                raise RayJobError(
                    f"job {self.name!r} is {status.phase} and has no supervisor any more: somebody ended it. Its launchers "
                    "end by themselves after fifteen minutes; submit it again to have them replaced now."
                )
            if deadline is not None and now > deadline:
                raise TimeoutError(f"job {self.name!r} is {status.phase} after {timeout:g} s.\n{status}")
            time.sleep(_LOOK_S)

    def _have_it_alive(self, ray: Any, supervisor: Any, silence: Silence) -> None:
        """End a supervisor that hangs: Ray starts another life of it, which goes on from what is written."""
        waited_s = silence.patience_s
        sign, now = _memory().last_sign(self.name), time.monotonic()
        if silence.hangs(sign, now, lambda: _alive(ray, supervisor)):
            _LOG.warning(
                "job %r: its supervisor has given no sign of life for %.0f s, though Ray holds it for alive. It is ended, and "
                "Ray starts it again; whatever trains goes on. If that happens again look at the head node's load.",
                self.name,
                waited_s,
            )
            ray.kill(supervisor, no_restart=False)

    def stop(self, timeout: float | None = None) -> JobStatus:
        """Ask all ranks to save and leave at the same step, and wait until it is over. Submitted again, it goes on from there."""
        _check_timeout(timeout)
        _connected()
        self._bind()
        if not self.status().over:
            _memory().ask_to_stop(self.name, self._token)
        return self.wait(timeout)

    def _bind(self) -> None:
        """Mean the newest submission of that name from now on, where this was not submitted here."""
        if not self._token:
            self._token = _token(self.name)

    def _is_open(self) -> bool:
        """Return whether what stands under the name is this submission's: it is once its supervisor has begun. Raises where it
        was, and is another's by now."""
        if self._token and _token(self.name) != self._token:
            if self._begun:
                raise _OvertakenError(
                    f"job {self.name!r} is over, and another one was submitted under its name: how it ended is not known any more. "
                    f"attach({self.name!r}) finds the new one."
                )
            return False
        self._begun = True
        return True


def attach(name: str) -> Job:
    """Return a job that was submitted by another program, or in another life of this one. Raises :class:`RayJobError`."""
    if not is_name(name):
        raise RayJobError(f"attach({name!r}): that is not the name of a job.")
    _connected()
    found = _read(name, _memory().submission)
    if found is None:
        known = _memory().names()
        others = f" Those that were: {', '.join(known)}." if known else ""
        raise RayJobError(f"no job {name!r} was ever submitted to this cluster.{nearest(name, known)}{others}")
    return Job(_read(name, lambda _: JobSpec.from_text(found.spec)), found.token)


def _pieces(text: str) -> list[str]:
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]


def _ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise ImportError("Ray is not installed: pip install 'resilience-sdk[ray]' brings it.")
    import ray  # noqa: PLC0415 - whoever only describes a job needs none

    return ray


def _connected() -> Any:
    """Return Ray, connected to a cluster that is there. Raises :class:`RayJobError` where there is none."""
    ray = _ray()
    if not ray.is_initialized():
        try:
            _reach(ray)
            ray.init(address="auto")
        except ConnectionError as error:
            raise RayJobError(
                f"this program is connected to no Ray cluster, and none was found: {error}. Nothing was asked of any job. "
                'Connect first, ray.init(address="HOST:PORT"), or set RAY_ADDRESS.'
            ) from error
    return ray


def _reach(ray: Any) -> None:
    """Raise ``ConnectionError`` where the cluster that ``ray.init`` would find does not answer: it waits for minutes, silently."""
    services = ray._private.services
    if "://" in str(services.get_ray_address_from_environment("auto", None)):
        return  # Ray's own client, which has a deadline
    host, _, port = str(services.canonicalize_bootstrap_address("auto") or "").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except OSError as error:
        raise ConnectionError(f"nobody answers at {host}:{port} ({error})") from error


def _memory() -> ModuleType | Any:
    from resilience.integrations.ray import memory  # noqa: PLC0415

    return memory


def _read(name: str, how: Callable[[str], Any]) -> Any:
    """Return what stands in a job's entry. Raises :class:`RayJobError` where that means nothing to this version."""
    try:
        return how(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RayJobError(
            f"the entry of job {name!r} in the cluster's store can't be read ({type(error).__name__}: {error}). Another version of "
            "resilience has written it: use that one here too, or submit the job again when it is over."
        ) from error


def _check_timeout(timeout: object) -> None:
    """Raise for what is no number of seconds, before anything is asked of the cluster."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and not math.isnan(timeout)
    if timeout is not None and not number:
        raise TypeError(f"timeout={timeout!r}: give a number of seconds, or None to wait for as long as it takes.")


def _token(name: str) -> str:
    """Return which submission of that name is the newest."""
    found = _read(name, _memory().submission)
    return "" if found is None else str(found.token)


def _supervisor(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=_memory().NAMESPACE)
    except ValueError:
        return None


def _alive(ray: Any, actor: Any) -> bool:
    return bool(ray._private.state.actors(actor._actor_id.hex()).get("State") == "ALIVE")


def _await_gone(ray: Any, name: str) -> None:
    """Wait for the last moments of a job of that name that is over. Raises :class:`RayJobError` where one is not over."""
    deadline = time.monotonic() + _MISSED_S
    while _supervisor(ray, name) is not None and time.monotonic() < deadline:
        state = _read(name, _memory().load)
        if state is not None and not state.phase.over:
            raise _taken(name, state.phase.value)
        time.sleep(_LOOK_S)


def _taken(name: str, phase: str) -> RayJobError:
    return RayJobError(f"a job {name!r} is {phase} on this cluster. attach({name!r}) finds it; stop it first.")
