"""``/healthz`` for the kubelet: 200 while the controller is well, else 503. Bound to loopback unless told otherwise."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from resilience.errors import ConfigError


@contextlib.contextmanager
def serving(where: str, well: Callable[[], bool]) -> Iterator[int]:
    """Serve in the background while the block runs; yields the port, 0 where nothing was asked for."""
    if not where:
        yield 0
        return
    host, _, port = where.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal():
        raise ConfigError(f"--health {where}: {port!r} is not a port. Write PORT, or HOST:PORT.")

    class Answer(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            known = self.path in ("/healthz", "/livez", "/readyz")
            fine = known and well()
            self.send_response(200 if fine else 503 if known else 404)
            self.end_headers()
            self.wfile.write(b"ok\n" if fine else b"not well\n" if known else b"")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: it is asked every few seconds."""

    try:
        server = ThreadingHTTPServer((host, int(port)), Answer)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--health {where}: can't listen there: {error}.") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(2.0)
