"""``resilience store``: the rendezvous store by itself, on a host that does not train.

A job whose store is in one of its launchers ends when that launcher is killed. With this it does not: start it on a login or
head node, and give its address as ``--rdzv-endpoint`` with ``--rdzv-conf=is_host=false`` on every node.
"""

from __future__ import annotations

import signal
import socket
import sys
from datetime import timedelta

from resilience.command import Parser


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = Parser(
        prog="resilience store", description="Serve the rendezvous store of jobs, apart from the nodes that train."
    )
    parser.add_argument("--host", default=socket.gethostname(), help="name to announce (default: this host's)")
    parser.add_argument(
        "--port", type=int, default=29400, help="port to listen on, on all interfaces (0: any; default: 29400)"
    )
    args = parser.parse_args(argv)
    if not 0 <= args.port <= 65535:
        parser.error(f"--port={args.port}: a port is a number from 0 to 65535")
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before torch starts threads
    from torch.distributed import TCPStore  # noqa: PLC0415

    try:
        store = TCPStore("localhost", args.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except RuntimeError as error:
        sys.stderr.write(f"resilience store: port {args.port} can't be served: {str(error).splitlines()[0]}\n")
        return 2
    sys.stdout.write(
        f"resilience store: serving {args.host}:{store.port}. Start every node with --rdzv-backend=c10d "
        f"--rdzv-endpoint={args.host}:{store.port} --rdzv-conf=is_host=false --rdzv-id=NAME\n"
    )
    sys.stdout.flush()
    signal.sigwait(signals)
    return 0
