"""Going on: agree with the other ranks on a snapshot, load it, and say whether it is good.

1) (rank) asks the saver, which answers when all ranks have asked: this one, in memory or on disk
2) (rank) loads it; its digests are checked beside the copying
3) (rank) says that it is good, or what is wrong with it
4) (saver) lets all go on, or offers the next one to all
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilience.checkpoint import garbage, progress, reading, storage
from resilience.checkpoint.link import Link, Place
from resilience.checkpoint.reading import Opened
from resilience.checkpoint.state import Part
from resilience.errors import CheckpointError, NothingToRestore

_LOG = logging.getLogger("resilience.checkpoint")
_BAD = (CheckpointError, OSError, ValueError, RuntimeError, KeyError, TypeError)


class MisfitError(CheckpointError):
    """What was saved does not fit what is there. Another checkpoint would not either."""


def agree(
    link: Link,
    place: Place,
    directory: Path,
    *,
    step: int | None,
    fresh: bool,
    load: Callable[[Opened], None],
    begin: Callable[[int], None],
    timeout: float,
    known: Callable[[int], mmap.mmap | None] = lambda fd: None,
) -> int | None:
    """Load the newest snapshot that all ranks can reach (or that of ``step``); return its step, or ``None`` if there is none.

    ``fresh``: begin anew if there is none. ``begin`` is told the generation that what is saved from now on belongs to. ``known``
    gives this process's own mapping of a slot, by a descriptor of it.
    Raises ``NothingToRestore`` if there are some and all of them are bad, ``MisfitError`` if they do not fit.
    """
    if isinstance(step, bool) or not isinstance(step, int | None):
        raise CheckpointError(f"restore({step!r}): the step must be a whole number, or None for the newest.")
    question = {"op": "restore", "step": step, "fresh": fresh, "timeout": timeout}
    answer, fds = link.ask(question, timeout=timeout + 10)
    misfit = ""
    while answer.get("found"):
        began, chosen = time.monotonic(), answer
        what = f"restoring step {answer['step']} from {answer['found']}" if place.rank == 0 else ""
        wrong, unfit = _tried(lambda answer=answer, fds=fds: _open(answer, fds, place, known), load, what)  # type: ignore[misc]
        misfit = wrong if unfit else misfit
        answer, fds = link.ask({"op": "loaded", "wrong": wrong[:4000]}, timeout=timeout + 10)
        if answer.get("go"):
            took = time.monotonic() - began
            _LOG.info(
                "step %s restored from %s in %.2f s (rank %s).", chosen["step"], chosen["found"], took, place.rank
            )
            begin(int(answer["generation"]))
            return int(chosen["step"])
    if misfit:
        raise MisfitError(f"{misfit} (rank {place.rank}). Training can't go on from it; strict=False loads what fits.")
    if answer.get("problems"):
        raise NothingToRestore(
            f"every checkpoint in {directory} is bad: {'; '.join(answer['problems'])}. Nothing can be restored."
        )
    if fresh and step is None:
        begin(int(answer["generation"]))
    return None


def _tried(open_it: Callable[[], Opened], load: Callable[[Opened], None], what: str) -> tuple[str, bool]:
    """Open a snapshot and load it; return what is wrong with it, or an empty text, and whether it does not fit.

    ``what`` is shown to a person who waits for it, if it is not empty.
    """
    opened: Opened | None = None

    def fraction() -> float:
        return opened.check.fraction() if opened is not None else 0.0

    try:
        with garbage.left_alone(), progress.shown(what, fraction, shows=bool(what)):
            opened = open_it()
            load(opened)
            return opened.check.wrong(), False
    except MisfitError as error:
        return str(error), True
    except Exception as error:  # a script's own code is given what may be damaged, and raises what it likes
        damage = _damage(opened)
        if not damage and not isinstance(error, _BAD):
            raise
        return damage or (
            str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        ), False


def _damage(opened: Opened | None) -> str:
    """Say what is damaged in what was opened, as far as it can be said."""
    try:
        return opened.check.wrong() if opened is not None else ""
    except _BAD:
        return ""


def _open(answer: dict[str, Any], fds: list[int], place: Place, known: Callable[[int], mmap.mmap | None]) -> Opened:
    if answer["found"] == "memory":
        return reading.open_memory(answer, fds, place.rank, place.local_world, known)
    path = Path(answer["path"])
    return reading.open_disk(path, storage.read_manifest(path), place.rank)


def load_parts(parts: Sequence[Part], opened: Opened, strict: bool) -> None:
    """Give every part its state back. With ``strict`` nothing is changed unless all of it fits."""
    check_parts(parts, opened, strict)
    for part in parts:
        if part.name in opened.values:
            part.load(opened.values[part.name], opened.source)


def check_parts(parts: Sequence[Part], opened: Opened, strict: bool) -> None:
    """Raise :class:`MisfitError`, or only say so, if what was saved is not what is there."""
    if not isinstance(opened.values, dict):
        raise MisfitError("what was saved is no state of this kind")
    said = []
    if strict:
        names = {part.name for part in parts}
        said += [f"{name} was not saved" for name in sorted(names - opened.values.keys())]
        said += [f"{name} was saved and is not given here" for name in sorted(opened.values.keys() - names)]
    for part in parts:
        if part.name in opened.values:
            said += part.check(opened.values[part.name], opened.source, strict)
    if said and strict:
        raise MisfitError("; ".join(said))
    for text in said:
        _LOG.warning("%s; left as it is.", text)
