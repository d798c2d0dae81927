"""Write down everything that a worker can see of its start; torch-free.

Usage: ``parity_probe.py [words …]``; the facts go to ``$PARITY_OUT/<rank>.<restart>.json``. The words are only recorded,
except ``fail-once``, which ends the first life of every rank with exit code 9.
"""

NAMES = sorted(name for name in globals() if name.startswith("__"))  # before anything else of ours is here

import json  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


class Sample:
    """Something to pickle that lives in ``__main__``."""

    def __init__(self, value: int) -> None:
        self.value = value


def facts(own: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return what this process can see; ``own`` are the globals of ``__main__``, ``names`` those it began with."""
    main = sys.modules["__main__"]
    spec = own["__spec__"]
    return {
        "environ": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "name": own["__name__"],
        "file": own.get("__file__"),
        "package": own["__package__"],
        "doc": own["__doc__"].splitlines()[0],
        "spec": spec and [spec.name, spec.origin, spec.parent],
        "loader": type(own["__loader__"]).__name__,
        "cached": own.get("__cached__"),
        "names": names,
        "is_main": vars(main) is own,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "executable": sys.executable,
        "cwd": str(Path.cwd()),
        "signals": {item.name: str(signal.getsignal(item)) for item in sorted(signal.valid_signals()) if item < 32},
        "blocked": [int(item) for item in sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))],
        "leads_session": os.getsid(0) == os.getpid(),
        "streams": [(str(item), item.line_buffering, item.isatty()) for item in (sys.stdin, sys.stdout, sys.stderr)],
        "torch": "torch" in sys.modules,
        "pickled": type(pickle.loads(pickle.dumps(Sample(1)))).__qualname__,
    }


def write_facts(own: dict[str, Any], names: list[str]) -> None:
    """Write the facts of this rank's life."""
    rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    (Path(os.environ["PARITY_OUT"]) / f"{rank}.{life}.json").write_text(json.dumps(facts(own, names)))
    # In one piece: ranks share a console, and print() writes the end by itself.
    sys.stdout.write(f"out {rank} {life}\n")
    sys.stdout.flush()
    sys.stderr.write(f"err {rank} {life}\n")
    sys.stderr.flush()
    if "fail-once" in sys.argv and life == "0":
        out, world = Path(os.environ["PARITY_OUT"]), int(os.environ["WORLD_SIZE"])
        # The first to fail ends the others, and they have facts to write.
        while len(list(out.glob("*.0.json"))) < world:
            time.sleep(0.01)
        sys.exit(9)


if __name__ == "__main__":
    write_facts(globals(), NAMES)
