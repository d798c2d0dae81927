"""What a job keeps on the shared file system, and what is read there: ``DIR/JOB`` with one run directory for each start.

Rule: reading trusts nothing. What is torn, or of another version, counts as not there.

Hazard: job numbers repeat, where a controller was installed anew or two clusters share a file system. So a start first makes the
folder its own (:func:`claim`); what another job left there is set aside.

Hazard: ``DIR`` may be open to all, and the next job's number is easily guessed. A folder that another user has made is refused, and
no link is ever written through.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from resilience.integrations import cause
from resilience.integrations.slurm import chain

from resilience.failover import failure, progress, sentence

_UNREADABLE = (OSError, ValueError, OverflowError, RecursionError)  # OverflowError: JSON's Infinity as a whole number
_MARK, _CHAIN = "job.json", "chain.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o755  # of folders: whatever the umask, nobody else puts anything into them


@dataclass(frozen=True)
class Start:
    """Whose folder it is: the cluster, and which of the job's starts was the last one here."""

    cluster: str
    restart: int


def claim(home: Path, start: Start) -> Path | None:
    """Make the folder this job's, with a run directory for this start; return where another job's things are now, if any were.

    Raises ``OSError``, for a folder of another user's too. A mark that can't be written is no reason not to train: the next start
    then remembers nothing.
    """
    home.mkdir(_MODE, parents=True, exist_ok=True)
    _refuse_another_users(home)
    run_dir = home / str(start.restart)
    old = [] if _is_ours(_marked(home), start) else [home / _MARK, home / _CHAIN, *_run_dirs(home)]
    aside = _set_aside(home, [path for path in [*old, run_dir] if os.path.lexists(path)])
    run_dir.mkdir(_MODE)  # anew: what is below it is this start's
    with contextlib.suppress(OSError):
        _write(home, _MARK, asdict(start))
    return aside


def _refuse_another_users(home: Path) -> None:
    """Raise unless the folder is no link, and has the owner that new files get here (some file systems give all to one user)."""
    try:
        folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if home.is_symlink():
            raise _refusal(home, "is a link") from error
        raise
    probe = f".{secrets.token_hex(8)}"
    try:
        fd = os.open(probe, _NEW, 0o600, dir_fd=folder)
        owner, ours = os.fstat(folder).st_uid, os.fstat(fd).st_uid
        os.close(fd)
        os.unlink(probe, dir_fd=folder)
    except PermissionError:
        owner, ours = os.fstat(folder).st_uid, os.geteuid()
        if owner == ours:
            raise
    finally:
        os.close(folder)
    if owner != ours:
        raise _refusal(home, f"belongs to user {owner}, and we are user {ours}")


def _refusal(home: Path, why: str) -> OSError:
    remedy = "remove it or have it removed, or give another directory, which others can't write to (--dir)"
    return PermissionError(
        errno.EPERM, f"{home} {why}: what is written there could end up in other files. To go on, {remedy}"
    )


def _is_ours(marked: Start | None, start: Start) -> bool:
    """Whether a folder with that mark was left by an earlier start of this job. Pure."""
    return marked is not None and marked.cluster == start.cluster and marked.restart < start.restart


def _marked(home: Path) -> Start | None:
    try:
        told = json.loads((home / _MARK).read_text(encoding="utf-8"))
        return Start(str(told["cluster"]), int(told["restart"]))
    except (*_UNREADABLE, KeyError, TypeError):
        return None


def _run_dirs(home: Path) -> list[Path]:
    return [path for path in home.iterdir() if path.name.isdecimal()]


def _set_aside(home: Path, paths: Sequence[Path]) -> Path | None:
    if not paths:
        return None
    aside = home / "earlier" / time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        if not aside.exists():
            break
        aside = aside.with_name(f"{aside.name.partition('_')[0]}_{number}")
    aside.mkdir(_MODE, parents=True)
    for path in dict.fromkeys(paths):
        path.rename(aside / path.name)
    return aside


def has_begun(run_dir: Path) -> bool:
    """Whether a launcher has come so far as to write anything; it may have where that can't be seen."""
    try:
        return any((run_dir / name).exists() for name in ("ends", "logs", "progress", "cycles"))
    except OSError:
        return True


def _reports(run_dir: Path) -> list[Path]:
    """Return the reports of a start; none where the shared file system has a bad moment. Those who poll look again."""
    try:
        return list((run_dir / "cycles").glob("*.json"))
    except OSError:
        return []


def lost_in(run_dir: Path) -> int | None:
    """Return the cycle that ended with a lost node, if none has begun since, as far as can be seen."""
    cycles = [int(path.stem) for path in _reports(run_dir) if path.stem.isdecimal()]
    try:
        if not cycles or progress.begun(run_dir) > max(cycles):
            return None
        return max(cycles) if _kind(run_dir / "cycles" / f"{max(cycles)}.json") == "node" else None
    except (*_UNREADABLE, KeyError, TypeError):
        return None


@functools.lru_cache(maxsize=2)  # it has the stacks of all ranks in it, and says the same whenever it is read
def _kind(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["culprit"]["kind"])


def last_failure(run_dir: Path) -> tuple[int, str]:
    """Return the highest step that launchers told of, and the cause of the newest report; empty where it can't repeat itself, and
    where it was survived: something else ended the start.

    Steps are in reports, and in what launchers keep while they run: one that is killed writes no report.
    """
    best, newest = progress.read(run_dir), (-1, "")
    for path in _reports(run_dir):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            steps = [rank.get("step") for rank in report["ranks"]]
            culprit = report["culprit"]
            kind, cycle = str(culprit["kind"]), int(report["cycle"])
            passes = kind == "node" or report["action"] in cause.GOES_ON
            said = f"{kind}: {failure.without_numbers(str(culprit['message']))}"
        except (*_UNREADABLE, KeyError, TypeError, AttributeError):
            continue  # torn, or of another version
        best = max([best, *(step for step in steps if type(step) is int)])
        newest = max(newest, (cycle, "" if passes else said))
    return best, newest[1]


def stop_failure(run_dir: Path) -> str:
    """Return what failed after the job was asked to stop, in words; empty where nothing did."""
    newest = (-1, "")
    for path in _reports(run_dir):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            culprit, failed = report["culprit"], report["action"] == sentence.PREEMPTED
            said = f"{culprit['kind']} of rank {culprit['rank']}: {culprit['message']}" if failed else ""
            newest = max(newest, (int(report["cycle"]), " ".join(said.split())))
        except (*_UNREADABLE, KeyError, TypeError, AttributeError):
            continue
    return newest[1]


def recall(home: Path) -> chain.History:
    """Return what was remembered; nothing where there is nothing that can be read."""
    try:
        told = json.loads((home / _CHAIN).read_text(encoding="utf-8"))
        return chain.History(int(told["counted"]), str(told["cause"]), int(told["step"]))
    except (*_UNREADABLE, KeyError, TypeError):
        return chain.History()


def remember(home: Path, history: chain.History) -> None:
    """Keep it for the next start. Raises ``OSError``."""
    _write(home, _CHAIN, asdict(history))


def _write(home: Path, name: str, told: object) -> None:
    partial = home / f".{name}.{secrets.token_hex(8)}"
    with os.fdopen(os.open(partial, _NEW, 0o644), "w", encoding="utf-8") as file:
        try:
            file.write(json.dumps(told))
            file.flush()
            os.fsync(file.fileno())  # a shared file system may say only now that it is full
            partial.replace(home / name)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
