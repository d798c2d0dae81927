"""Give command lines that start nothing to both launchers' ``main``; print the exit code of each as one line of JSON.

Usage: ``parity_usage.py RUN_DIR``, with ``{name: [words]}`` on stdin. In one process: torch is imported once.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.run import main as torchrun

from resilience.launcher.cli import main as ours


def code_of(main: Callable[[list[str]], Any], words: list[str]) -> int:
    """Return the exit code that the interpreter would end with."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return int(main(words) or 0)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except Exception:  # noqa: BLE001 - whatever it is, the interpreter ends with 1
        return 1


if __name__ == "__main__":
    mistakes = json.load(sys.stdin)
    own = f"--ft-run-dir={sys.argv[1]}"
    codes = {
        "torchrun": {name: code_of(torchrun, words) for name, words in mistakes.items()},
        "ours": {name: code_of(ours, [own, *words]) for name, words in mistakes.items()},
    }
    print(json.dumps(codes))
