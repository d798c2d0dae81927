"""One rank's failure: how it ended, in its own words where it left any, and whether it only fell over another one.

:func:`examine` is pure: exit status, error file, end of the log and the kernel's word on memory in, :class:`RankFailure` out.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EXCEPTION, OOM, SIGNAL, EXIT = "exception", "oom", "signal", "exit"
NODE = "node"  # a whole node is lost

HARDWARE_CODES: Mapping[int, str] = {
    14: "infoROM corrupted",
    128: "unknown device",
    201: "driver error",
    202: "residual processes on the device",
}


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended badly. Plain data: it crosses nodes as JSON.

    ``at_ns`` is CLOCK_MONOTONIC, of node 0 once it has crossed: the moment of the exception where one was recorded, else
    of the end of the process. ``echo``: it broke because another rank was gone. ``signature`` is equal for failures that are
    the same but for numbers. ``began``: something of the training ran, or may have.
    """

    rank: int
    exit_code: int  # negative: signal
    at_ns: int
    kind: str = EXIT
    message: str = ""
    traceback: str = ""
    signature: str = ""
    echo: bool = False
    began: bool = True
    error_code: int | None = None
    step: int | None = None
    sections: tuple[Mapping[str, Any], ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    chain: tuple[Mapping[str, str], ...] = ()
    log: tuple[str, ...] = ()
    log_path: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankFailure:
        """Read what :meth:`as_json` made; what a newer version added is left out."""
        known = {item.name for item in dataclasses.fields(cls)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**{name: value for name, value in values.items() if name in known})


_LOG_LINES = 12


def examine(
    rank: int,
    exit_code: int,
    ended_ns: int,
    *,
    error: Mapping[str, Any] | None = None,
    log: str = "",
    log_path: str | None = None,
    oom: str | None = None,
    sections: Sequence[Mapping[str, Any]] = (),
) -> RankFailure:
    """Say how a rank ended.

    ``error``: the contents of its error file, ours or torch's. ``log``: the end of its stderr. ``oom``: what the kernel says
    about its memory, if it killed it. ``sections``: those that its page shows as open.
    """
    known = _Words.of(error, log, exit_code)
    ours = known.ours
    told = [(item["name"], item["age_s"]) for item in _mappings(ours.get("sections"), "name", "age_s")]
    ours_open = tuple({"name": str(name), "age_s": age} for name, age in told if isinstance(age, (int, float)))
    open_sections: tuple[Mapping[str, Any], ...] = ours_open or tuple(sections)
    inner = str(open_sections[-1]["name"]) if open_sections else ""
    kind, message = _kind(exit_code, known, oom)
    return RankFailure(
        rank=rank,
        exit_code=exit_code,
        at_ns=_whole(ours.get("mono_ns")) or ended_ns,
        kind=kind,
        message=message,
        traceback=known.trace,
        signature=_signature(kind, exit_code, known, inner),
        echo=is_echo(known.type, known.message) or (exit_code == -signal.SIGABRT and _aborted_by_watchdog(log)),
        began=known.begins == TRAINING,
        error_code=_whole(ours.get("error_code")),
        step=_whole(ours.get("step")),
        sections=open_sections,
        context=_mapping(ours.get("context")),
        versions=_mapping(ours.get("versions")),
        chain=tuple(
            {"type": str(link["type"]), "message": str(link["message"])}
            for link in _mappings(ours.get("chain"), "type", "message")
        ),
        log=tuple(log.splitlines()[-_LOG_LINES:]),
        log_path=log_path,
    )


def _whole(value: Any) -> int | None:
    """Return a whole number, if it is one: an error file may hold anything."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _mapping(value: Any) -> dict[str, Any]:
    return {str(name): item for name, item in value.items()} if isinstance(value, Mapping) else {}


def _mappings(value: Any, *names: str) -> tuple[dict[str, Any], ...]:
    """Return the mappings in a list that have all these names."""
    items = value if isinstance(value, (list, tuple)) else ()
    return tuple(dict(item) for item in items if isinstance(item, Mapping) and all(name in item for name in names))


TRAINING, NOTHING, ARGUMENTS = "training", "nothing", "arguments"
_STARTS_THE_SCRIPT = re.compile(
    r"(/resilience/_worker/__main__\.py|/(runpy|pkgutil)\.py|<frozen (runpy|pkgutil|importlib.*)>)$"
)


@dataclass(frozen=True)
class _Words:
    """The rank's last words, from wherever it left them."""

    type: str = ""
    message: str = ""
    trace: str = ""
    ours: Mapping[str, Any] = field(default_factory=dict)

    @property
    def begins(self) -> str:
        """How far the script got, as its frames tell.

        NOTHING of it ran, where it can't be opened, found or compiled; it refused its ARGUMENTS; else it may have been TRAINING.
        """
        files = [str(frame["file"]) for frame in _mappings(self.ours.get("frames"), "file")]
        if files and all(_STARTS_THE_SCRIPT.search(file) for file in files):
            return NOTHING
        refused = self.type == "SystemExit" and files and files[-1].endswith("/argparse.py")
        return ARGUMENTS if refused else TRAINING

    @property
    def source(self) -> str:
        """What led to the last exception, or that itself."""
        chain = _mappings(self.ours.get("chain"), "type", "message")
        return f"{chain[-1]['type']}: {chain[-1]['message']}" if len(chain) > 1 else self.message

    @classmethod
    def of(cls, error: Mapping[str, Any] | None, log: str, exit_code: int) -> _Words:
        ours = (error or {}).get("resilience")
        told = (error or {}).get("message")
        if isinstance(told, Mapping):
            said = str(told.get("message", ""))
            trace = str(_mapping(told.get("extraInfo")).get("py_callstack", ""))
            kind, _, text = said.partition(": ")
            if isinstance(ours, Mapping):
                return cls(str(ours.get("type", kind)), str(ours.get("message", text)), trace, ours)
            return cls(kind, text, trace)
        if isinstance(told, str) and told:  # torch allows plain text
            kind, _, text = told.partition(": ")
            return cls(kind, text) if _EXCEPTION_LINE.match(told) else cls("Error", told)
        if exit_code < 0:
            return cls(trace=last_crash(log))
        said = last_exception(log) if exit_code == 1 else ""  # what Python ends with on an exception
        kind, _, text = said.partition(": ")
        return cls(kind, text, last_traceback(log) if said else "")


def _kind(exit_code: int, known: _Words, oom: str | None) -> tuple[str, str]:
    """Return the kind and the sentence that says what happened."""
    short = known.type.rpartition(".")[2]
    said = f"{short}: {known.message}" if known.message else short
    if exit_code < 0 and oom is not None:
        return OOM, oom
    if known.type and is_out_of_memory(known.type, known.message):
        return OOM, f"out of memory: {said}"
    if exit_code < 0:
        return SIGNAL, f"ended by signal {-exit_code} ({signal_name(-exit_code)})"
    if short == "SystemExit":
        return EXIT, _exit_in_words(exit_code, known)
    if known.type:
        return EXCEPTION, said
    return EXIT, f"ended with exit code {exit_code}{_hardware(exit_code)}"


def _exit_in_words(exit_code: int, known: _Words) -> str:
    """Return the sentence for a script that ended itself, or could not be run."""
    if known.begins != TRAINING:
        why = f"it can't be run: {known.source}" if known.begins == NOTHING else "it refused its arguments"
        return f"the script ended with exit code {exit_code} at its start: {why}"
    text = f": {known.message}" if known.message and known.message != str(exit_code) else ""
    return f"ended with exit code {exit_code}{_hardware(exit_code)} (sys.exit{text})"


def _hardware(exit_code: int) -> str:
    return f", {HARDWARE_CODES[exit_code]}" if exit_code in HARDWARE_CODES else ""


def signal_name(number: int) -> str:
    """Return a signal's name, or its number in words."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- the same but for numbers -----------------------------------------------------------------------------------------

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+,? in (?P<function>\S+)', re.MULTILINE)
_FOREIGN = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>")


def _signature(kind: str, exit_code: int, known: _Words, section: str) -> str:
    if known.type and known.type != "SystemExit":
        return "|".join([known.type, without_numbers(known.message), _user_frame(known)])
    return f"{kind} {exit_code}|{section}"


def without_numbers(text: str) -> str:
    """Return the first line of a message with its numbers and addresses taken out."""
    first = text.strip().split("\n", 1)[0][:500]
    return re.sub(r"\d+", "#", re.sub(r"0x[0-9a-fA-F]+", "#", first))


def _user_frame(known: _Words) -> str:
    """Return the innermost frame of the user's own code: file and function, no line, since edits above move it."""
    frames = [frame for frame in _mappings(known.ours.get("frames"), "file", "function") if frame.get("user")]
    if frames:
        return f"{frames[-1]['file']}:{frames[-1]['function']}"
    found = [(match["file"], match["function"]) for match in _FRAME.finditer(known.trace)]
    mine = [item for item in found if not any(part in item[0] for part in _FOREIGN)] or found
    return f"{mine[-1][0]}:{mine[-1][1]}" if mine else ""


# -- fallen over another rank -----------------------------------------------------------------------------------------

_BROKEN_PEER = re.compile(
    r"connection (was )?(closed|reset) by (the )?(remote )?peer|broken pipe|socket timeout|connection refused"
    r"|failed to (recv|send), got \d+ bytes|recvvalue failed|sendbytes failed|recvbytes failed"
    r"|timed out waiting \d+ms for (recv|send) operation|nccl(remote|system|internal)?error|nccl communicator was aborted"
    r"|watchdog caught collective operation timeout|unhandled system error|connectfullmesh|gloo.*(timeout|timed out)"
    r"|client socket has timed out|no output channel|wait timeout after",
    re.IGNORECASE,
)
_OWN_DEVICE = re.compile(r"cuda (error|failure)|ncclunhandledcudaerror", re.IGNORECASE)  # no peer's doing
_GONE_FROM_RESTORE = re.compile(r"\b(ended|was lost) while the ranks were restoring")  # what we raise for the others
_RAISED_BY_TORCH = {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}


def is_echo(kind: str, message: str) -> bool:
    """Whether an exception is what a collective raises when another rank has gone, or a restore in which all take part."""
    short = kind.rpartition(".")[2]
    if short == "CheckpointError":
        return bool(_GONE_FROM_RESTORE.search(message))
    if short not in _RAISED_BY_TORCH or _OWN_DEVICE.search(message):
        return False
    return bool(_BROKEN_PEER.search(message)) or short in ("DistNetworkError", "DistBackendError")


def _aborted_by_watchdog(log: str) -> bool:
    return "ProcessGroup" in log and "atchdog" in log and not _OWN_DEVICE.search(log)


_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|std::bad_alloc|_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(kind: str, message: str) -> bool:
    """Whether an exception says that memory ran out, the host's or the device's."""
    short = kind.rpartition(".")[2]
    if short.endswith("MemoryError"):
        return True
    torchs = ("RuntimeError", "OSError", "AcceleratorError", "DistBackendError")
    return short in torchs and bool(_NO_MEMORY.search(message))


# -- what a log tells -------------------------------------------------------------------------------------------------

_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.<>]*(:|$)")
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch marks tracebacks once a process group exists


def last_traceback(log: str) -> str:
    """Return the last Python traceback in a log, or an empty string."""
    _, mark, tail = _TORCH_PREFIX.sub("", log).rpartition("Traceback (most recent call last):")
    if not mark:
        return ""
    lines = tail.splitlines()
    end = next((i for i, line in enumerate(lines) if i and line and not line.startswith((" ", "\t"))), len(lines) - 1)
    return mark + "\n".join(lines[: end + 1])


def last_exception(log: str) -> str:
    """Return the line of the last traceback that names the exception, or an empty string."""
    trace = last_traceback(log)
    final = trace.splitlines()[-1].strip() if trace else ""
    return final if final and _EXCEPTION_LINE.match(final) else ""


def last_crash(log: str) -> str:
    """Return the stacks that the interpreter wrote when it was hit by a fatal signal, or an empty string."""
    _, mark, tail = log.rpartition("Fatal Python error: ")
    return mark + tail.rstrip() if mark else ""
