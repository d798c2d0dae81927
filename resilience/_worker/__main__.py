"""Start a worker: fetch its page, register its signals, then become the script.

Run as ``python PATH/resilience/_worker [-m] SCRIPT ARGS``: by path and not with ``-m``, so that ``sys.path[0]`` is this
folder, which holds nothing that could shadow a module, until it is set to what the script expects.

The script must not be able to tell: same ``__main__``, ``sys.argv``, ``sys.path``, exit codes and tracebacks.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any


def prepare() -> Callable[[], None]:
    """Make this process a watched rank; return what is to be called when the script has returned.

    An interpreter that can't import ``resilience`` (another ``PYTHON_EXEC``) runs the script as torchrun would.
    """
    try:
        from resilience.pulse import lifeline
    except ImportError:
        return lambda: None
    return lifeline.begin()


def become_script(path: str, arguments: list[str]) -> None:
    """Run a script as ``python path arguments`` does."""
    import importlib.machinery
    import runpy

    sys.argv = [path, *arguments]
    main = types.ModuleType("__main__")
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):  # noqa: PTH112
        sys.path[0] = path
        sys.modules["__main__"] = main
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    main.__file__ = path
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__cached__ = None  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def become_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m name arguments`` does."""
    import runpy

    sys.argv = [name, *arguments]  # runpy puts the file in place of the name
    sys.path[0] = os.getcwd()  # noqa: PTH109
    sys.modules["__main__"] = types.ModuleType("__main__")
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Do it all; a script's own exception is shown without our frames."""
    finish = prepare()
    as_module = arguments[0] == "-m"
    rest = arguments[1:] if as_module else arguments
    sys.orig_argv[:] = [sys.orig_argv[0], "-u", *arguments]
    try:
        (become_module if as_module else become_script)(rest[0], rest[1:])
    except SystemExit:
        raise
    except BaseException as error:
        # Show it as the interpreter would, without our frames; then let it go its way for the exit code (and SIGINT).
        error.__traceback__ = _without_our_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = _already_shown
        raise
    finally:
        finish()


def _already_shown(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    pass


def _without_our_frames(trace: Any) -> Any:
    own = __file__
    while trace is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
