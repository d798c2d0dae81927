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
from dataclasses import dataclass
from typing import Any

from resilience.checkpoint import garbage, progress, reading, stores
from resilience.checkpoint.encoding import UnknownCodec
from resilience.checkpoint.link import Link, Place
from resilience.checkpoint.reading import Opened
from resilience.checkpoint.saver.restoring import Back
from resilience.checkpoint.source import DamagedError
from resilience.checkpoint.state import Module, Part, Random
from resilience.checkpoint.stores import Where
from resilience.checkpoint.together import Together
from resilience.errors import CheckpointError, NothingToRestore

_LOG = logging.getLogger("resilience.checkpoint")
# Begins the names of parts that need not be there: whatever can be switched on and off between runs.
OURS = "resilience."
_BAD = (CheckpointError, OSError, ValueError, RuntimeError, KeyError, TypeError)


class MisfitError(CheckpointError):
    """What was saved is sound, and does not fit what is there."""


def agree(
    link: Link,
    place: Place,
    directory: stores.Where,
    *,
    step: int | None,
    back: Back | None = None,
    fresh: bool,
    load: Callable[[Opened], None],
    begin: Callable[[int], None],
    timeout: float,
    known: Callable[[int], mmap.mmap | None] = lambda fd: None,
    ranks: Together = Together(needed=False),  # noqa: B008 - has no state
) -> int | None:
    """Load the newest snapshot that all ranks can reach (or that of ``step``, or one so far ``back``); return its step, or ``None``
    if there is none.

    ``fresh``: begin anew if there is none. ``begin`` is told the generation that what is saved from now on belongs to. ``known``
    gives this process's own mapping of a slot, by a descriptor of it.
    Raises ``NothingToRestore`` if there are some and all of them are bad, or nothing is so far back, ``MisfitError`` if the newest
    sound one does not fit: an older one is not taken for that, or the newer one would be lost without a word.
    """
    question = {"op": "restore", "step": step, "back": back, "fresh": fresh, "timeout": timeout}
    answer, fds = link.ask(question, timeout=timeout + 10)
    while answer.get("found"):
        began, chosen = time.monotonic(), answer
        what = f"restoring step {answer['step']} from {answer['found']}" if place.rank == 0 else ""
        tried = _tried(lambda answer=answer, fds=fds: _open(answer, fds, place, known), load, what, ranks)  # type: ignore[misc]
        try:
            answer, fds = link.ask({"op": "loaded", **tried.message()}, timeout=timeout + 10)
        except CheckpointError:
            if tried.misfit is None:
                raise
            where = f"step {chosen['step']} ({chosen['found']}) does not fit (rank {place.rank})"
            raise MisfitError(
                f"{where}: {tried.wrong}. Older ones were not tried. strict=False loads what fits."
            ) from tried.misfit
        if answer.get("go"):
            took = time.monotonic() - began
            _LOG.info(
                "step %s restored from %s in %.2f s (rank %s).",
                *(chosen["step"], chosen.get("where", chosen["found"]), took, place.rank),
            )
            begin(int(answer["generation"]))
            return int(chosen["step"])
    if back is not None:
        raise NothingToRestore(_nothing_so_old(back, answer, place, directory))
    if answer.get("problems"):
        raise NothingToRestore(
            f"every checkpoint in {directory} is bad: {'; '.join(answer['problems'])}. Nothing can be restored."
        )
    if fresh and step is None:
        begin(int(answer["generation"]))
    return None


def _nothing_so_old(back: Back, answer: dict[str, Any], place: Place, directory: Where) -> str:
    steps = [f"{back.steps} steps older than the newest"] if back.steps or back.before is None else []
    wanted = " and ".join([*steps, *([f"below step {back.before}"] if back.before is not None else [])])
    there = ", ".join(f"step {step} ({where})" for step, where in answer.get("there", ()))
    bad = "".join(f"; {text}" for text in answer.get("problems", ()))
    return (
        f"there is no snapshot {wanted} in memory or in {directory} (rank {place.rank}). There is {there or 'nothing'}{bad}. "
        "Nothing was changed. More slots, a larger memory_every or a smaller disk_every reach further back."
    )


def begin_afresh(step: int | None, allowed: bool, place: Place, directory: Where) -> None:
    """There is nothing to go on from: say so, or raise :class:`NothingToRestore` if that is not ``allowed``."""
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if not allowed or step is not None:
        advice = " For a run that begins here: restore(allow_fresh_start=True)." if step is None else ""
        raise NothingToRestore(
            f"there is {which} in memory or in {directory} (rank {place.rank}). Nothing was changed.{advice}"
        )
    _LOG.info("no checkpoint in %s: a fresh start.", directory)


@dataclass(frozen=True)
class Tried:
    """What came of loading a snapshot: nothing wrong, or what; and if it is the script that it does not fit, why."""

    wrong: str = ""
    misfit: BaseException | None = None

    def message(self) -> dict[str, Any]:
        """Return it as the saver wants to hear it."""
        return {"wrong": self.wrong[:4000], "misfit": self.misfit is not None}


def _tried(open_it: Callable[[], Opened], load: Callable[[Opened], None], what: str, ranks: Together) -> Tried:
    """Open a snapshot and load it; ``what`` is shown to a person who waits for it, if it is not empty.

    A snapshot that can't be opened, or whose digests are wrong, is bad, whatever was raised: a script's own code may have been
    given what is damaged. If it is sound and can't be loaded, it does not fit.
    """
    opened: Opened | None = None

    def fraction() -> float:
        return opened.check.fraction() if opened is not None else 0.0

    try:
        with garbage.left_alone(), progress.shown(what, fraction, shows=bool(what)):
            with ranks.or_none():
                opened = open_it()
            load(opened)
            return Tried(opened.check.wrong())
    except (MisfitError, UnknownCodec) as error:
        return Tried(str(error), error)
    except DamagedError as error:
        return Tried(str(error))
    except Exception as error:  # a script's own code raises what it likes
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if opened is None:
            if not isinstance(error, _BAD):
                raise
            return Tried(text)
        damage = _damage(opened)
        return Tried(damage) if damage else Tried(f"{text}. Some of it may have been loaded already", error)


def _damage(opened: Opened) -> str:
    """Say what is damaged in what was opened, as far as it can be said."""
    try:
        return opened.check.wrong()
    except _BAD:
        return ""


def _open(answer: dict[str, Any], fds: list[int], place: Place, known: Callable[[int], mmap.mmap | None]) -> Opened:
    if answer["found"] == "memory":
        return reading.open_memory(answer, fds, place.rank, place.local_world, known)
    path = stores.where(answer["path"])
    return reading.open_disk(path, stores.read_manifest(path), place.rank)


@dataclass(frozen=True)
class Wish:
    """How parts are to be loaded. ``strict``: nothing is changed unless all of it fits. ``alone``: whatever else was saved is not
    asked for. ``any_world``: what belongs to single ranks is given back although there were more or fewer of them."""

    strict: bool = True
    alone: bool = False
    any_world: bool = False


def load_parts(parts: Sequence[Part], opened: Opened, place: Place, wish: Wish, ranks: Together) -> None:
    """Give every part its state back."""
    with ranks.or_none():
        check_parts(parts, opened, wish)
        refuse_other_world([part.name for part in parts if not part.any_world], opened, place, wish.any_world)
        if (
            opened.world != place.world and place.rank == 0 and not wish.any_world
        ):  # one is enough: it reads more than its own
            refuse_divided([part for part in parts if isinstance(part, Module)], opened, place)
    for part in parts:
        if part.name not in opened.values:
            continue
        if part.name.startswith(OURS) and opened.world != place.world:
            _LOG.warning("%s begins anew: %s ranks saved it, and here are %s.", part.name, opened.world, place.world)
        elif not opened.stranger or part.any_world:
            part.load(opened.values[part.name], opened.source)
        elif isinstance(part, Random):
            part.derive(opened.values[part.name], opened.source, place.rank)
        else:
            _LOG.warning("%s has no state for rank %s: %s ranks saved it.", part.name, place.rank, opened.world)


def refuse_other_world(names: Sequence[str], opened: Opened, place: Place, allowed: bool) -> None:
    """Raise :class:`MisfitError` for what belongs to single ranks if there were more or fewer of them."""
    mine = [name for name in names if name != Random.name and not name.startswith(OURS)]
    if mine and opened.world != place.world and not allowed:
        raise MisfitError(
            f"it was saved by {opened.world} ranks, and here are {place.world}; {', '.join(mine)} may be different on each (a "
            "place in the data, for instance). If it is the same on all, say so: "
            f"FlashCheckpoint(…, replicated={mine!r}). Otherwise allow_other_world=True gives it back to the ranks that "
            "were there, and new ranks keep what they have"
        )


def refuse_divided(modules: Sequence[Module], opened: Opened, place: Place) -> None:
    """Raise :class:`MisfitError` for modules that had other values on each rank: nobody knows what more or fewer are to get."""
    found = [module.name for module in modules if module.differs_by_rank(opened.source)]
    if found:
        raise MisfitError(
            f"it was saved by {opened.world} ranks, and here are {place.world}; {', '.join(found)} had other values on each "
            "of them, and nothing says how to divide them anew: they were not replicated, and are no DTensors. Go on with "
            f"{opened.world} ranks. allow_other_world=True gives each rank its own back, and new ranks what rank 0 had"
        )


def check_parts(parts: Sequence[Part], opened: Opened, wish: Wish) -> None:
    """Raise :class:`MisfitError`, or only say so, if what was saved is not what is there."""
    if not isinstance(opened.values, dict):
        raise MisfitError("what was saved is no state of this kind")
    names = {part.name for part in parts if not part.name.startswith(OURS)}
    saved = {name for name in opened.values if not name.startswith(OURS)}
    if Random.name in names - saved:  # of a checkpoint of others, or saved with rng=False
        _LOG.warning("%s was not saved: random numbers go on from wherever this rank is.", Random.name)
    said = [f"{name} was not saved" for name in sorted(names - saved - {Random.name})]
    said += [] if wish.alone else [f"{name} was saved and is not given here" for name in sorted(saved - names)]
    for part in parts:
        if part.name in opened.values:
            said += part.check(opened.values[part.name], opened.source, wish.strict)
    if said and wish.strict:
        raise MisfitError("; ".join(said))
    for text in said:
        _LOG.warning("%s; left as it is.", text)
