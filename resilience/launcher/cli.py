"""``resilience run``: torchrun's command line, and ours on top.

torch's own parser is used as it is, ``PET_*`` variables included, so whatever torchrun accepts is accepted with the same
meaning. On top: ``--ft-cfg-path`` and one ``--ft-<name>`` per setting. An unknown flag raises and names the nearest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Collection, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from resilience import command, config
from resilience.config import ACCEPTED_WITHOUT_EFFECT, Settings
from resilience.errors import ConfigError, UnsupportedPlatform
from resilience.failover import exits
from resilience.launcher import lines
from resilience.values import show


class Parser(command.Parser):
    """The launcher's: it takes abbreviations of torch's flags."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=True, **more)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Allow abbreviations of torch's flags, as torchrun does, and of none of ours.

        argparse looks for them in the whole command line: ``train.py --workers 4`` must not be taken for one of ours.
        """
        found = super()._get_option_tuples(option_string)  # argparse has no public hook for it
        return [item for item in found if item[0].container is not self.ours]  # type: ignore[attr-defined]

    ours: Any = None


def add_settings(parser: Parser, only: Collection[str] | None = None) -> None:
    """Add ``--ft-cfg-path`` and a flag for every setting, or for those that ``only`` names: a flag without effect is an error."""
    known = {name: item for name, item in config.parameters().items() if only is None or name in only}
    every = "every setting" if only is None else "the settings that matter here"
    group = parser.ours = parser.add_argument_group(
        "resilience", f"{every}; `resilience config` prints the values in force"
    )
    group.add_argument(
        *("--ft-cfg-path", "--ft-cfg_path", "--fault-tol-cfg-path"),
        metavar="FILE",
        dest="ft_cfg_path",
        help="YAML file with a 'fault_tolerance:' section",
    )
    for name, item in known.items():
        initial = item.default_factory() if callable(item.default_factory) else item.default
        help_text = f"{item.metadata['doc']} (default: {show(initial, item.metadata['kind'])})"
        group.add_argument(*_spellings(name), dest=f"ft_{name}", metavar="X", help=help_text)
    for name in (name for name in _ALSO_AS_SWITCHES if name in known):
        group.add_argument(
            *dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")),
            dest=f"ft_{name}",
            action="store_const",
            const="true",
            help=f"the same as --ft-{name.replace('_', '-')}=true",
        )
    if only is not None:
        return
    for name in ACCEPTED_WITHOUT_EFFECT:
        group.add_argument(*_spellings(name), dest=f"ft_{name}", help=argparse.SUPPRESS)
    group.add_argument(
        *("--term-timeout", "--term_timeout", "--workers-stop-timeout", "--workers_stop_timeout"),
        dest="stop_timeout",
        type=float,
        metavar="S",
        help="ft_launcher's names of --shutdown-timeout",
    )
    group.add_argument("--ignore-missing-fault-tol-cfg", action="store_true", help=argparse.SUPPRESS)


_ALSO_WITHOUT_PREFIX = ("restart_policy", "dynamic_failover_extension", "accelerator")
_ALSO_AS_SWITCHES = ("network_check", "exclude_straggler")  # without a value, as dlrover-run has them


def _spellings(name: str) -> list[str]:
    """Return all flags of a setting: ours, with underscores, and ft_launcher's older ones."""
    dashed = name.replace("_", "-")
    ours = [f"--ft-{dashed}", f"--ft-{name}", f"--ft-param-{name}", f"--ft-param-{dashed}"]
    bare = [f"--{dashed}", f"--{name}"] if name in _ALSO_WITHOUT_PREFIX else []
    return list(dict.fromkeys(ours + bare))


def settings_from(args: argparse.Namespace) -> Settings:
    """Resolve the settings from parsed flags, the environment and the YAML file."""
    names = [*config.parameters(), *ACCEPTED_WITHOUT_EFFECT]
    flags = {name: value for name in names if (value := getattr(args, f"ft_{name}", None)) is not None}
    return config.resolve(flags, config.environment(), args.ft_cfg_path)


def main(argv: list[str]) -> int:
    """Run a job; return the exit code."""
    if sys.platform != "linux":
        raise UnsupportedPlatform(
            f"resilience run needs Linux (memfd, pidfd); this is {sys.platform}. The in-loop calls are no-ops here."
        )
    # A store that is gone gives a page of C++ per call.
    with interrupted_at_once(), config.told_to_ourselves("TORCH_CPP_LOG_LEVEL", "ERROR"):
        from torch.distributed.run import get_args_parser  # noqa: PLC0415 - `resilience --help` and `config` need no torch

    _open_missing_streams()
    parser = Parser(
        prog="resilience run",
        description="Start a training script on this node and keep it running: torchrun, with a monitor per rank.",
        parents=[get_args_parser()],
        conflict_handler="resolve",
    )
    add_settings(parser)
    args = parser.parse_args(argv)
    try:
        settings = settings_from(args)
        lines.start(settings.launcher.log_level)
        if words := behind_the_script(args.training_script_args, parser._option_string_actions):
            logging.getLogger("resilience.launcher").warning(
                "behind %s stands %s: that goes to the script, as with torchrun. Flags of the launcher stand before the script.",
                args.training_script,
                ", ".join(words),
            )
        return _run(args, settings)
    except ConfigError as error:
        return _refused(error, exits.USAGE)


# Flags that mean a launcher wherever they stand. Scripts have others of ours as their own: --accelerator, --log-dir, --master-addr.
_UNMISTAKABLE = re.compile(
    "--(nnodes|nproc-per-node|max-restarts|network-check|exclude-straggler|dynamic-failover-extension|(rdzv|ft|fault-tol)-.+)"
)


def behind_the_script(words: Iterable[str], known: Container[str]) -> list[str]:
    """Return which of the script's arguments are flags of the launcher; behind a ``--`` they are meant for the script."""
    flags = ((word.partition("=")[0], word) for word in itertools.takewhile(lambda word: word != "--", words))
    return [word for flag, word in flags if flag in known and _UNMISTAKABLE.fullmatch(flag.replace("_", "-"))]


def _refused(error: ConfigError, code: int) -> int:
    """Say why nothing was started; return the exit code."""
    sys.stderr.write(f"resilience run: {error}\n")
    _leave_word(str(error))
    return code


def _leave_word(said: str) -> None:
    """Tell whoever started this launcher, in the error file that it named, as torch does for what ends later."""
    path = config.error_file()
    if path:
        told = {"message": {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(told), encoding="utf-8")


@contextlib.contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Have SIGINT end the process while something of torch's is imported: its C++ throws Python's KeyboardInterrupt away."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _run(args: Any, settings: Settings) -> int:
    with interrupted_at_once():
        import torch  # noqa: PLC0415
        from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
            RendezvousConnectionError,
            RendezvousError,
            RendezvousTimeoutError,
        )

        from resilience.launcher.launch import Session  # noqa: PLC0415
        from resilience.launcher.meeting import NotWanted  # noqa: PLC0415
        from resilience.launcher.rundir import DiskFault  # noqa: PLC0415

    log = logging.getLogger("resilience.launcher")
    # Its lines name whoever was ended last; the report names the culprit.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(lines.says_more_than_the_report)
    torch.multiprocessing._set_thread_name("pt_elastic")
    try:
        session = Session(_job(args, settings))
    except NotWanted as error:
        log.error("%s This launcher ends with exit code %s.", error.outcome.why, error.outcome.exit_code)
        return error.outcome.exit_code
    except DiskFault as error:  # it may have room again, elsewhere or later
        return _refused(error, exits.FAILED)
    try:
        record(session.run)()  # torch's record: an outer launcher finds the first failure in its error file
    except ConfigError:  # an accelerator that only its own process could try
        session.exit_code = exits.USAGE
        raise
    except ChildFailedError:
        pass  # reported, and the session knows its exit code
    except SignalException as stop:
        log.warning("ended by %s.", stop.sigval.name)
        session.ended_by(stop.sigval)
    except KeyboardInterrupt:
        log.warning("ended by SIGINT.")
        session.exit_code = 130
    except NotWanted as error:
        log.warning("%s. This launcher ends with exit code %s.", error.outcome.why, error.outcome.exit_code)
        session.exit_code = error.outcome.exit_code
    except RendezvousError as error:
        log.error("%s", _rendezvous_failure(error, args))
        began = session.agent is not None and session.agent.cycle >= 0
        if isinstance(error, RendezvousConnectionError) and began:
            session.exit_code = session.report_cut_off("the rendezvous store is gone")
        elif isinstance(error, (RendezvousConnectionError, RendezvousTimeoutError)):
            session.exit_code = exits.CUT_OFF
    finally:
        _ignore([*args.signals_to_handle.split(","), "SIGUSR1", "SIGUSR2"])  # one more must not stop the cleaning up
        session.close()
    _end_if_in_store(session.exit_code)
    return session.exit_code


def _end_if_in_store(code: int) -> None:
    """End this process at once where a thread is still in a call of torch's store. The interpreter would end that thread by
    force, and torch's C++ abort the process for it: its exit code would say nothing of the job."""
    from resilience.launcher.link import IN_STORE  # noqa: PLC0415 - needs torch

    if any(thread.name.startswith(IN_STORE) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _ignore(signals: Iterable[str]) -> None:
    for name in signals:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            signal.signal(getattr(signal, name.strip()), signal.SIG_IGN)


def _open_missing_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr the null device there, before a socket gets the number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _check_numbers(launch: Any) -> None:
    """Raise for numbers that torch would stumble over later."""
    for what, number, least in (
        ("--nproc-per-node", launch.nproc_per_node, 1),
        ("--nnodes", launch.min_nodes, 1),
        ("--max-restarts", launch.max_restarts, 0),
    ):
        if number < least:
            raise ConfigError(f"{what}={number}: it must be at least {least}. Nothing was started.")
    if launch.min_nodes > launch.max_nodes:
        raise ConfigError(
            f"--nnodes={launch.min_nodes}:{launch.max_nodes}: the minimum is above the maximum. Nothing was started."
        )


def _rendezvous_failure(error: Exception, args: Any) -> str:
    """Say what a failed rendezvous means."""
    where = f"{args.rdzv_backend} at {args.rdzv_endpoint or 'this host'}"
    sentences = {
        "RendezvousTimeoutError": f"fewer than --nnodes={args.nnodes} nodes came together in time ({where}). Look at the nodes "
        "that are missing, or allow fewer with --nnodes=MIN:MAX",
        "RendezvousClosedError": f"the job was ended by another node ({where}). Its log has the cause",
        "RendezvousConnectionError": f"the rendezvous store does not answer ({where}). Check --rdzv-endpoint, and that its "
        "host runs",
    }
    return sentences.get(type(error).__name__, f"the rendezvous failed ({where}): {error}") + ". No workers run here."


def _job(args: Any, settings: Settings) -> Any:
    """Turn parsed arguments into a job, as ``torch.distributed.run.run`` does."""
    from torch.distributed.run import config_from_args, parse_min_max_nnodes, run_script_path  # noqa: PLC0415

    from resilience.launcher.launch import WORKER, Job  # noqa: PLC0415
    from resilience.pulse.lifeline import run_path  # noqa: PLC0415

    if args.stop_timeout is not None and args.shutdown_timeout is None:
        args.shutdown_timeout = math.ceil(args.stop_timeout)
    local = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    try:
        most_nodes = parse_min_max_nnodes(args.nnodes)[1]
    except (ValueError, RuntimeError):
        raise ConfigError(f"--nnodes={args.nnodes}: give a number, or MIN:MAX. Nothing was started.") from None
    if args.standalone or (local and most_nodes == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    own_logs = settings.launcher.capture_logs and not (
        args.log_dir or args.logs_specs or args.redirects != "0" or args.tee != "0"
    )
    shown = set(map(int, args.local_ranks_filter.split(","))) if args.local_ranks_filter else None
    if own_logs:
        args.log_dir = "/dev/null"  # torch would make a directory of its own in /tmp
    try:
        launch, entrypoint, arguments = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError) as error:  # torch says it in these
        raise ConfigError(
            f"{error or 'these numbers of nodes and processes do not fit'}. Nothing was started."
        ) from error
    _check_numbers(launch)
    if entrypoint is run_script_path:
        entrypoint = run_path
    elif not args.no_python:
        arguments = [*arguments[:1], WORKER, *arguments[1:]]  # python -u WORKER [-m] script …
    return Job(launch, entrypoint, arguments, args.training_script, settings, own_logs, shown)
