"""``@record``: what killed this rank, in its own words, on disk before it is gone.

The file is torch's (``TORCHELASTIC_ERROR_FILE``, same layout), so plain torchrun reads it; everything that torch leaves out
stands beside it under ``"resilience"``. The trampoline records what leaves an undecorated script in the same way.

Rule: whatever happens in here, the exception that is on its way out goes on unchanged, and soon. All of it, the user's own
``__str__`` and the file system included, runs in a thread that is given up on after :data:`DEADLINE_S`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import platform
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from resilience import config
from resilience.pulse import attach, client
from resilience.pulse.attach import trace_crashes
from resilience.pulse.page import W_IN_FLIGHT

F = TypeVar("F", bound=Callable[..., Any])
DEADLINE_S = 5.0
_TEXT = 64 * 1024  # characters of any one text; a model's repr in a message must not fill the disk
_SHORT = 4 * 1024
_CONTEXT = 64
_CHAIN = 16
_FRAMES = 64
_RECORDED = "__resilience_recorded__"
_FLIGHT = "__resilience_flight__"
_context: dict[str, Any] = {}


def annotate(**context: Any) -> None:
    """Remember facts that an error report of this process should carry: ``annotate(batch=path, lr=0.1)``.

    A later value replaces an earlier one of the same name; ``None`` takes it away. Values are kept as they are and turned
    into text only when there is a report to write.
    """
    for name, value in context.items():
        if value is None:
            _context.pop(name, None)
        else:
            _context[name] = value


@overload
def record(function: F, error_handler: Any = None) -> F: ...
@overload
def record(function: None = None, error_handler: Any = None, *, error_code: int | None = None) -> Callable[[F], F]: ...
def record(function: Any = None, error_handler: Any = None, *, error_code: int | None = None) -> Any:
    """Decorate a main function, plain or async, so that what ends it is recorded.

    Every exception is, ``KeyboardInterrupt``, ``SystemExit`` with a code other than 0 and other ``BaseException``s included,
    and goes on as it came. ``error_code`` (or an attribute of that name on the exception) is a number of your own for
    failover extensions. ``error_handler`` is accepted for torch's sake: its ``record_exception`` is called as well.
    """
    if function is None:
        return lambda inner: _wrap(inner, error_handler, error_code)
    return _wrap(function, error_handler, error_code)


def _wrap(function: Callable[..., Any], handler: Any, error_code: int | None) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def recorded_async(*args: Any, **kwargs: Any) -> Any:
            trace_crashes()
            try:
                return await function(*args, **kwargs)
            except BaseException as error:
                _record(error, handler, error_code)
                raise

        return recorded_async

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        trace_crashes()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _record(error, handler, error_code)
            raise

    return recorded


def _record(error: BaseException, handler: Any, error_code: int | None) -> None:
    if handler is not None and isinstance(error, Exception):
        with contextlib.suppress(Exception):  # somebody else's; the exception on its way out is the one that counts
            handler.record_exception(error)
    capture(error, error_code)  # after it: ours keeps its words and adds to them


def capture(error: BaseException, error_code: int | None = None) -> None:
    """Write the report of an exception that is about to end this process. Never raises; takes :data:`DEADLINE_S` at most."""
    with contextlib.suppress(BaseException):
        if is_success(error) or error.__dict__.get(_RECORDED) == os.getpid():
            return
        error.__dict__[_RECORDED] = os.getpid()
        error.__dict__[_FLIGHT] = Flight()
        mono_ns, wall_ns, thread = time.monotonic_ns(), time.time_ns(), threading.get_ident()

        def write() -> None:
            with contextlib.suppress(BaseException):
                _write(error, error_code, mono_ns, wall_ns, thread)

        worker = threading.Thread(target=write, name="resilience-record", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # no more threads: then without a deadline
            write()
        else:
            worker.join(DEADLINE_S)


class Flight:
    """Lives as long as an exception that was recorded, and says so in the page: one that goes while the process goes on was
    caught, and is no reason why the rank might die."""

    final = False  # the script is over: whatever goes now was not caught

    def __init__(self) -> None:
        self._page = attach.page_if_attached()
        self._pid = os.getpid()
        self._since = time.monotonic_ns()
        if self._page is not None:
            self._page.words[W_IN_FLIGHT] = self._since

    def __del__(self) -> None:
        page = self._page
        if page is None or Flight.final or self._pid != os.getpid():
            return
        if page.words[W_IN_FLIGHT] == self._since:
            page.words[W_IN_FLIGHT] = 0


def script_is_over() -> None:
    """Say that what is in flight now is what ends the script."""
    Flight.final = True


atexit.register(script_is_over)


def is_success(error: BaseException) -> bool:
    """Whether it is an exit that the interpreter turns into 0."""
    if not isinstance(error, SystemExit):
        return False
    return error.code is None or (isinstance(error.code, int) and error.code == 0)


def _write(error: BaseException, error_code: int | None, mono_ns: int, wall_ns: int, thread: int) -> None:
    path = config.error_file()
    if path is None or _safe(lambda: _hand_on(error), False):
        return
    report = describe(error, error_code, mono_ns, wall_ns, thread)
    target = Path(path)
    report["message"] = _already_told(target, report["message"]) or report["message"]
    text = json.dumps(report, default=_as_text)
    if target.exists() and not target.is_file():  # /dev/null, a pipe
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _already_told(target: Path, message: dict[str, Any]) -> dict[str, Any] | None:
    """Return what torch's own ``@record`` wrote about the same exception: its words stay as they are, ours are added."""
    if not target.is_file():
        return None
    told = _safe(lambda: json.loads(target.read_text(encoding="utf-8"))["message"], None)
    return told if isinstance(told, dict) and told.get("message") == message["message"] else None


def _hand_on(error: BaseException) -> bool:
    """A launcher inside this process failed: torch knows how to hand on the first failure of its children."""
    first = getattr(error, "get_first_failure", None)
    if first is None or type(error).__name__ != "ChildFailedError":
        return False
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # noqa: PLC0415 - loaded already

    _, failure = first()
    if not Path(failure.error_file).is_file():
        return False
    get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
    return True


def describe(
    error: BaseException, error_code: int | None, mono_ns: int, wall_ns: int, thread: int | None = None
) -> dict[str, Any]:
    """Return the error file's contents: torch's layout, and ours beside it."""
    env = config.rank_environment()
    code = error_code if error_code is not None else _safe(lambda: getattr(error, "error_code", None), None)
    code = code if isinstance(code, int) and not isinstance(code, bool) else None
    said = f"{type(error).__name__}: {_text_of(error)}"
    trace = "".join(_safe(lambda: _formatted(error), [said]))[-_TEXT:]
    message: dict[str, Any] = {
        "message": said,
        "extraInfo": {"py_callstack": trace, "timestamp": str(wall_ns // 1_000_000_000)},
    }
    if code is not None:
        message["errorCode"] = code
    links = list(_chain(error))
    ours = {
        "type": _name(type(error)),
        "bases": [base.__name__ for base in type(error).__mro__[1:-1]],
        "message": _text_of(error),
        "error_code": code,
        "wall_ns": wall_ns,
        "mono_ns": mono_ns,
        "rank": env.rank,
        "cycle": env.cycle,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": _safe(client.last_step, None),
        "sections": _safe(lambda: _sections(links, mono_ns), []),
        "chain": [{"type": _name(type(link)), "message": _text_of(link)[:_SHORT]} for link in links],
        "frames": _safe(lambda: _frames(error.__traceback__), []),
        "threads": _safe(lambda: _other_threads(thread), ""),
        "versions": _safe(_versions, {}),
        "context": {name: _as_text(value) for name, value in list(_context.items())[-_CONTEXT:]},
    }
    return {"message": message, "resilience": ours}


def _formatted(error: BaseException) -> list[str]:
    """Return the traceback with its causes, without the frames of ours around the script."""
    trace, ours = error.__traceback__, f"{Path(__file__).parent}{os.sep}"
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return list(traceback.TracebackException(type(error), error, trace).format())


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and what led to it, newest first."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and all(link is not other for other in seen) and len(seen) < _CHAIN:
        seen.append(link)
        yield link
        context = None if link.__suppress_context__ else link.__context__
        link = link.__cause__ if link.__cause__ is not None else context


def _sections(links: list[BaseException], now_ns: int) -> list[dict[str, Any]]:
    """Return the sections that were open, outermost first: those that the exception unwound, and those still open."""
    left = [item for link in links for item in client.sections_left_by(link)]
    opened = dict(sorted([*left, *client.open_sections()], key=lambda item: item[1]))
    return [
        {"name": name, "age_s": round((now_ns - opened_ns) / 1e9, 3)}
        for name, opened_ns in sorted(opened.items(), key=lambda item: item[1])
    ]


def _frames(trace: TracebackType | None) -> list[dict[str, Any]]:
    """Return the frames, outermost first; ``user`` marks those that belong neither to Python nor to an installed package."""
    foreign = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    foreign.add(str(Path(__file__).parent))
    found = []
    for frame in traceback.extract_tb(trace)[-_FRAMES:]:
        inside = frame.filename.startswith("<") or any(frame.filename.startswith(f"{folder}/") for folder in foreign)
        found.append({"file": frame.filename, "line": frame.lineno, "function": frame.name, "user": not inside})
    return found


def _other_threads(raised_in: int | None) -> str:
    """Return the stacks of all threads but ours and the one whose exception is described."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident not in (raised_in, threading.get_ident()):
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"Thread {names.get(ident, ident)} (most recent call last):\n{stack}")
    return "\n".join(parts)[:_TEXT]


def _versions() -> dict[str, str]:
    """Return the versions that matter, of what is loaded: nothing is imported for this."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("resilience", "torch", "lightning", "pytorch_lightning", "numpy", "transformers"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    if cuda is not None:
        found["cuda"] = str(cuda)
    return found


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text_of(error: BaseException) -> str:
    return _safe(lambda: str(error)[:_TEXT], "(its text could not be made)")


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_SHORT]
    if isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    return _safe(lambda: repr(value)[:_SHORT], "(its text could not be made)")


_T = TypeVar("_T")


def _safe(make: Callable[[], _T], otherwise: Any) -> _T:
    """Return what ``make`` makes, or ``otherwise``: much of it is the user's code, in a process that is failing."""
    try:
        return make()
    except BaseException:  # noqa: BLE001 - half a report is better than none
        kept: _T = otherwise
        return kept
