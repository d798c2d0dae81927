"""Why a launcher ended, in a sentence, from what it leaves on its node.

1) its newest report, if that says that the job was ended (``cycles/<n>.json`` in its run folder): the rank, and what became of it
2) the error file that it was told of (torch's convention): what a launcher says that never got so far

Hazard: below the folder for temporary files anybody may have put anything. Only our own folders are looked into.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from resilience.integrations import cause as common


def run_folder(flags: Sequence[str], variables: Mapping[str, str], cwd: str | None, pid: int) -> Path | None:
    """Return where a launcher keeps its reports: as it was told, else the folder with its process id among the user's runs."""
    told = [word.partition("=")[2] for word in flags if word.startswith("--ft-run-dir=")]
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        if told:
            return Path(cwd or ".").absolute() / Path(told[0]).expanduser()
        base = Path(variables.get("XDG_STATE_HOME") or Path("~").expanduser() / ".local" / "state")
        homes = [base / "resilience" / "runs", *Path(tempfile.gettempdir()).glob("resilience-runs-*")]
        found = sorted(path for home in homes if _ours(home) for path in home.glob(f"*-{pid}") if _ours(path))
        return found[-1] if found else None
    return None


def cause(folder: Path | None, since: float, error_file: Path, node: str = "") -> str:
    """Return why a launcher that was started at ``since`` has ended, and where more is to be read; empty if nothing is known.

    ``node``: its name. What was another node's doing is told as that, with what is known of the folder there.
    """
    report = common.newest(folder / "cycles", since) if folder is not None else {}
    elsewhere = common.elsewhere(report, node)
    known = [why for why in (common.of_report(report, elsewhere), _of_error_file(error_file)) if why]
    place: object = folder if _is_there(folder) else ""
    if elsewhere and known:
        place = common.folder_of(report["culprit"].get("log_path"))
    return "; ".join([*known[:1], *([f"reports and logs of that node: {place}"] if place else [])])


def _ours(folder: Path) -> bool:
    """Return whether it is a folder, and this user's."""
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _is_there(folder: Path | None) -> bool:
    with suppress(OSError):  # a name that is too long, a folder that can't be reached
        return folder is not None and folder.is_dir()
    return False


def _of_error_file(path: Path) -> str:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return common.short(str(json.loads(common.read(path))["message"]["message"]))
    return ""
