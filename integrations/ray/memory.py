"""What outlives a job's supervisor and its driver: the job's spec and state, in the cluster's own key-value store (GCS).

A job's entry stays when the job is over, so that its end can be looked up; the next job of that name replaces it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from resilience.integrations.ray.state import State, recalled

NAMESPACE = "resilience"
_ROOM = NAMESPACE.encode()


@dataclass(frozen=True)
class Submission:
    """One submission of a job. ``driver``: the Ray job whose end is its end; empty for a detached one."""

    spec: str
    token: str
    driver: str = ""


def open_entry(name: str, submission: Submission) -> None:
    """Begin a job's entry anew. Only for whoever has the job's name, the supervisor: what stands here is what runs."""
    _internal_kv_del(_key(name, "sign"), namespace=_ROOM)
    save(name, State())
    text = json.dumps({"spec": submission.spec, "token": submission.token, "driver": submission.driver})
    _internal_kv_put(_key(name, "job"), text.encode(), overwrite=True, namespace=_ROOM)


def submission(name: str) -> Submission | None:
    """Return the newest submission of that name."""
    found = _internal_kv_get(_key(name, "job"), namespace=_ROOM)
    return Submission(**json.loads(found)) if found else None


def is_open_for(name: str, submitted: Submission) -> bool:
    """Return whether the entry is this submission's. One that means nothing to this version is another's."""
    try:
        return submission(name) == submitted
    except (ValueError, KeyError, TypeError):
        return False


def begin_life(name: str, mark: str) -> None:
    """Leave the mark of a supervisor's life: whoever finds another one than its own is not the job's any more."""
    _internal_kv_put(_key(name, "life"), mark.encode(), overwrite=True, namespace=_ROOM)


def newest_life(name: str) -> str:
    """Return the mark of the newest one."""
    return (_internal_kv_get(_key(name, "life"), namespace=_ROOM) or b"").decode()


def names() -> list[str]:
    """Return the names of all jobs that were ever submitted to this cluster."""
    found = [key.decode(errors="replace") for key in _internal_kv_list(_key("", "")[:-1], namespace=_ROOM)]
    return sorted(key.split("/")[1] for key in found if key.endswith("/job"))


def save(name: str, state: State) -> None:
    """Keep a job's state."""
    _internal_kv_put(_key(name, "state"), state.as_text().encode(), overwrite=True, namespace=_ROOM)


def load(name: str) -> State | None:
    """Return a job's state, if there was ever one of that name."""
    found = _internal_kv_get(_key(name, "state"), namespace=_ROOM)
    return State.from_text(found.decode()) if found else None


def recall(name: str) -> State:
    """Return what the job's supervisor goes on from; see :func:`recalled`."""
    found = _internal_kv_get(_key(name, "state"), namespace=_ROOM)
    state = recalled(found.decode(errors="replace"), time.time()) if found else State()
    if state.phase.over:
        save(name, state)  # now it can be read
    return state


def sign(name: str) -> None:
    """Leave a sign of life of the job's supervisor."""
    _internal_kv_put(_key(name, "sign"), repr(time.time()).encode(), overwrite=True, namespace=_ROOM)


def last_sign(name: str) -> float | None:
    """Return the time of the newest one, by the clock of the supervisor's host; ``None`` where there was none."""
    found = _internal_kv_get(_key(name, "sign"), namespace=_ROOM)
    return float(found) if found else None


def ask_to_stop(name: str, token: str) -> None:
    """Leave word that this submission of the job is to stop; its supervisor reads it, in whichever life."""
    _internal_kv_put(_key(name, "stop"), token.encode(), overwrite=True, namespace=_ROOM)


def stop_asked(name: str, token: str) -> bool:
    """Return whether somebody asked for it; what is meant for an earlier job of that name is not for this one."""
    return bool((_internal_kv_get(_key(name, "stop"), namespace=_ROOM) or b"") == token.encode())


def _key(name: str, what: str) -> bytes:
    return f"resilience/{name}/{what}".encode()
