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
    """Run a script, a directory or a zip file as ``python path arguments`` does."""
    import importlib.machinery
    import pkgutil
    import runpy

    sys.argv = [path, *arguments]
    full = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH117, PTH118 - __file__ is absolute
    main = _new_main()
    if pkgutil.get_importer(full) is not None:  # a directory, or a zip file of whatever name
        sys.path[0] = full
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _set_path0(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    try:
        with open(full, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {full!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from error
    main.__file__ = full
    main.__cached__ = None  # type: ignore[attr-defined]
    if full.endswith(".pyc"):
        import marshal

        main.__loader__ = importlib.machinery.SourcelessFileLoader("__main__", full)
        code = marshal.loads(source[16:])
    else:
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", full)
        code = compile(source, full, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def become_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m name arguments`` does."""
    import runpy

    sys.argv = [name, *arguments]  # runpy puts the file in place of the name
    _set_path0(os.getcwd())  # noqa: PTH109
    _new_main()
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def _new_main() -> types.ModuleType:
    """Put a fresh ``__main__`` in place, with the names that the interpreter gives it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__annotations__ = {}
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    return main


def _set_path0(folder: str) -> None:
    """Replace our own folder in ``sys.path``; with PYTHONSAFEPATH nothing takes its place."""
    sys.path[:1] = [] if getattr(sys.flags, "safe_path", False) else [folder]


def main(arguments: list[str]) -> None:
    """Do it all; a script's own exception is shown without our frames."""
    finish = prepare()
    as_module = arguments[0] == "-m"
    rest = arguments[1:] if as_module else arguments
    sys.orig_argv[:] = [sys.orig_argv[0], "-u", *arguments]
    try:
        (become_module if as_module else become_script)(rest[0], rest[1:])
    except SystemExit as stop:
        _record(stop)
        raise
    except BaseException as error:
        _record(error)
        _hide_our_frames()
        raise  # the interpreter does the rest: the hook, atexit, and for SIGINT the exit code
    finally:
        finish()


def _record(error: BaseException) -> None:
    """Write down what leaves the script, decorated or not."""
    if "resilience.pulse.lifeline" in sys.modules and not (isinstance(error, SystemExit) and error.code is None):
        from resilience import recording

        recording.capture(error)
        recording.script_is_over()


def _hide_our_frames() -> None:
    """Have the interpreter show the exception that is on its way out without the frames above the script's."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        inner = trace
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == __file__:
                inner = trace.tb_next
            trace = trace.tb_next
        error.__traceback__ = sys.last_traceback = inner
        shown(kind, error, inner)

    sys.excepthook = hook


if __name__ == "__main__":
    main(sys.argv[1:])
