"""``resilience nodecheck``: the node check by hand, on one node or on several that meet in a store.

The check is the launcher's own (:mod:`resilience.nodecheck`); only the board is another one: no cycle runs, so there is no line
between launchers. Each node writes a beat into the store; one that is silent for ``--ft-node-silence-timeout`` is gone.

Rule: who is told of a faulty node is said on the command line. A check by hand in a container that trains must not leave a message
there unasked: a controller would take the node out when the training ends.

Hazard: a call of a store whose host is frozen never returns. After ``--ft-store-silence-timeout`` a thread ends the command.

Exit codes: 0 fit, 80 unfit, 75 can't be told, or the other nodes did not come, 2 a flag that can't be meant.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilience import config
from resilience.config import Settings
from resilience.errors import ConfigError, UnsupportedPlatform
from resilience.failover import exits
from resilience.failover.error_monitor import NodeFault
from resilience.failover.marking import Marker, leave_message
from resilience.launcher import lines
from resilience.launcher.agreement import Node
from resilience.launcher.boards import Alone, TimedStore, join, mute
from resilience.launcher.cli import Parser, add_settings, interrupted_at_once, settings_from
from resilience.launcher.fitness import Result, consequences
from resilience.launcher.watchdog import Watchdog
from resilience.nodecheck import accelerators, pairing
from resilience.nodecheck.crew import Broken, Crew, harmless
from resilience.nodecheck.exchange import Examination, Interrupted, Terms
from resilience.nodecheck.judging import as_table

_LOG = logging.getLogger("resilience.launcher")
_JOIN_S = 600
_STAY_S = 30.0
_LOOK_S = 0.05
_SHOWN = 8
_SETTINGS = (
    "accelerator",
    "exclude_straggler",
    "straggler_factor",
    "node_check_timeout",
    "error_monitor",
    "error_monitor_timeout",
    "termination_log",
    "node_name",
    "run_dir",
    "node_silence_timeout",
    "store_silence_timeout",
    "log_level",
)


def main(argv: list[str]) -> int:
    """Check; print a table and a verdict; return the exit code."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _main(argv: list[str]) -> int:
    if sys.platform != "linux":
        raise UnsupportedPlatform(f"resilience nodecheck needs Linux; this is {sys.platform}.")
    parser = Parser(prog="resilience nodecheck", description="Check whether this node is fit to train.")
    parser.add_argument("--nnodes", help="nodes that check each other: a number, or MIN:MAX (default: 1)")
    parser.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", default="", metavar="HOST:PORT", help="where the nodes meet"
    )
    parser.add_argument(
        "--rdzv-id", "--rdzv_id", default="nodecheck", help="the same on all nodes (default: nodecheck)"
    )
    parser.add_argument(
        "--rdzv-conf", "--rdzv_conf", default="", help="as of `resilience run`: is_host, join_timeout, …"
    )
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1, help="devices that must be there")
    parser.add_argument("--local-addr", "--local_addr", default=None, help="where other nodes reach this one")
    add_settings(parser, _SETTINGS)
    args = parser.parse_args(argv)
    settings = settings_from(args)
    args.nnodes = _asked_nodes(args)
    if args.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node={args.nproc_per_node}: it must be at least 1. Nothing was started.")
    lines.start(settings.launcher.log_level)
    accelerators.check_name(settings.nodes.accelerator)
    marker = Marker(settings.nodes.error_monitor, settings.nodes.error_monitor_timeout)
    crew = Crew(settings.nodes.accelerator, config.environment())
    try:
        with contextlib.suppress(Broken):  # it is when it is asked, too
            crew.start()
        result = _check(args, settings, crew)
        if isinstance(result, int):
            return result
        if result.fault is not None:
            _tell(result.fault, settings, marker)
        return result.outcome.exit_code if result.outcome is not None else exits.FINISHED
    finally:
        crew.close()
        marker.close()


def _tell(fault: NodeFault, settings: Settings, marker: Marker) -> None:
    """Report this node as faulty, to whom the command line names."""
    if settings.nodes.termination_log is not None:
        leave_message(fault, settings.nodes.termination_log)
    marker.tell(fault)


@dataclass(frozen=True)
class Party:
    """Who checks whom. ``venue`` serves the store for as long as it is held."""

    board: Alone
    me: int
    names: tuple[str, ...]
    venue: Any = None

    def leave(self) -> None:
        """Go. Whoever serves the store goes last: the others must have read the ruling."""
        self.board.post(f"done/{self.me}", str(os.getpid()))
        if self.venue is None:
            return
        self.venue.leave()  # the next check in the same store begins anew
        deadline = time.monotonic() + (_STAY_S if self.venue.hosts_the_store else 0.0)
        while time.monotonic() < deadline and any(
            self.board.peek(f"done/{node}") is None
            for node in range(len(self.names))
            if node not in self.board.lost_nodes()
        ):
            time.sleep(_LOOK_S)


def _check(args: Any, settings: Settings, crew: Crew) -> Result | int:
    """Come together, check, and say what was found; return what it means, or the exit code where there is no verdict."""
    # A store that is gone gives a page of C++ per call. The crew ends with this process, however it ends.
    with interrupted_at_once(), config.told_to_ourselves("TORCH_CPP_LOG_LEVEL", "ERROR"):
        from torch.distributed.elastic.rendezvous import RendezvousError  # noqa: PLC0415

    store = TimedStore()
    watchdog = Watchdog(lambda _: _end(args, settings, crew), settings.launcher.store_silence_timeout, store.silent_for)
    try:
        return _examine(_meet(args, settings, store, watchdog), args, settings, crew)
    except RendezvousError as error:
        sys.stderr.write(f"resilience nodecheck: the nodes did not come together at {args.rdzv_endpoint}: {error}\n")
    except Interrupted as why:
        sys.stderr.write(f"resilience nodecheck: {why}. There is no verdict on this node.\n")
    except RuntimeError as error:  # torch's, of a store that is gone
        said = harmless(str(error).partition("\n")[0])
        sys.stderr.write(
            f"resilience nodecheck: the store at {args.rdzv_endpoint} is gone ({said}); the command on its node has probably "
            "ended. There is no verdict on this node. Look there; then start the check again on all nodes.\n"
        )
    finally:
        watchdog.close()
    return exits.CUT_OFF


def _examine(party: Party, args: Any, settings: Settings, crew: Crew) -> Result:
    terms = Terms(
        folder=str(Path(settings.launcher.run_dir or "").expanduser().absolute()),
        address=args.local_addr or socket.getfqdn(),
        wanted=args.nproc_per_node,
        timeout=settings.nodes.node_check_timeout,
        rule=pairing.Rule(settings.nodes.straggler_factor),
    )
    start = time.monotonic()
    try:
        ruling = Examination(party.board, party.me, party.names, crew=crew, terms=terms).run()
        nodes = [Node(name, ()) for name in party.names]
        out = settings.nodes.exclude_straggler
        result = consequences(ruling, nodes, party.me, out, run=args.rdzv_id, cycle=0, at=time.time())
        code = result.outcome.exit_code if result.outcome is not None else exits.FINISHED
        verdict = f"{party.names[party.me]}: {ruling.judgements[party.me].state}"
        took = time.monotonic() - start
        sys.stdout.write(f"{as_table(ruling, party.names)}\n{verdict} ({took:.1f} s), exit code {code}\n")
        sys.stdout.flush()
        party.leave()
    finally:
        party.board.close()
    return result


def _end(args: Any, settings: Settings, crew: Crew) -> None:
    """End the command from the watchdog's thread: the main one waits in a store call that never returns."""
    limit = settings.launcher.store_silence_timeout
    sys.stderr.write(
        f"resilience nodecheck: the store at {args.rdzv_endpoint} has not answered for {limit:g} s. There is no verdict on this "
        "node. Look at the host that serves the store, and at the way to it; then start the check again on all nodes.\n"
    )
    sys.stderr.flush()
    crew.close(patience=0.0)
    os._exit(exits.CUT_OFF)


def _asked_nodes(args: Any) -> str:
    """Return how many nodes check each other; raise where that is not said, though they are to meet."""
    if args.nnodes is None and args.rdzv_endpoint:
        raise ConfigError(
            f"--rdzv-endpoint={args.rdzv_endpoint} is where nodes meet, and --nnodes does not say how many: give --nnodes=N, the "
            "same on all nodes, or leave --rdzv-endpoint out to check this node alone. Nothing was started."
        )
    return args.nnodes or "1"


def _check_nodes(nnodes: str) -> None:
    """Raise for a number of nodes that can't be meant."""
    least, _, most = nnodes.partition(":")
    numbers = [least, most] if ":" in nnodes else [least]
    if not all(word.isdecimal() and int(word) > 0 for word in numbers) or int(numbers[0]) > int(numbers[-1]):
        raise ConfigError(f"--nnodes={nnodes}: give a number from 1 on, or MIN:MAX. Nothing was started.")


def _conf(text: str) -> dict[str, str]:
    """Read ``--rdzv-conf``; raise ``ValueError`` for what can't be meant."""
    found = {}
    for word in filter(None, text.split(",")):
        key, separator, value = (part.strip() for part in word.partition("="))
        if not (separator and key and value):
            raise ValueError(f"{word!r} is not of the form KEY=VALUE.")
        if (key.endswith("_timeout") or key.startswith("keep_alive")) and not _positive(value):
            raise ValueError(f"{key}={value}: it must be a number above 0.")
        found[key] = value
    return found


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _meet(args: Any, settings: Settings, store: TimedStore, watchdog: Watchdog) -> Party:
    """Come together with the other nodes, if there are to be any."""
    name = settings.failover.node_name or socket.gethostname()
    if args.nnodes == "1":
        return Party(Alone(), 0, (name,))
    _check_nodes(args.nnodes)
    if not args.rdzv_endpoint:
        raise ConfigError(f"--nnodes={args.nnodes} needs --rdzv-endpoint=HOST:PORT, the same on all nodes.")
    from torch.distributed import DistStoreError  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import RendezvousParameters  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint  # noqa: PLC0415
    from torch.distributed.run import parse_min_max_nnodes  # noqa: PLC0415

    from resilience.launcher.venue import DEFAULT_PORT, open_venue  # noqa: PLC0415

    try:
        least, most = parse_min_max_nnodes(args.nnodes)
        conf = {"join_timeout": _JOIN_S, **_conf(args.rdzv_conf)}
        parameters = RendezvousParameters(
            "c10d", args.rdzv_endpoint, args.rdzv_id, least, most, args.local_addr, **conf
        )
        parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=DEFAULT_PORT)
        parameters.get_as_bool("is_host")
    except (ValueError, RuntimeError) as error:
        given = f"--nnodes={args.nnodes}, --rdzv-endpoint={args.rdzv_endpoint}, --rdzv-conf={args.rdzv_conf}"
        raise ConfigError(f"{given}: {error} Nothing was started.") from error
    venue = open_venue(parameters, settings)
    venue.answered = watchdog.turn
    limit = settings.launcher.store_silence_timeout
    try:
        with watchdog.phase("the nodes did not come together", limit):
            info = venue.handler.next_rendezvous()
    except DistStoreError as error:  # the store answers: it has no word of the first node
        raise Interrupted(mute([0], venue.names(), limit / 3)) from error
    venue.answered = lambda: None
    store.store = info.store
    silence = settings.launcher.node_silence_timeout
    board, names = join(store, info.rank, name, info.world_size, silence, known=venue.names())
    _LOG.info("%s nodes have come together and check each other: %s.", len(names), ", ".join(names[:_SHOWN]))
    return Party(board, info.rank, names, venue)
