"""``python -I -S saver/__main__.py SETTINGS``: start a saver. ``SETTINGS`` is JSON, made by :mod:`checkpoint.hire`."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Start, and loop."""
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]  # what our starter imports from; nothing else of its environment matters

    import contextlib  # noqa: PLC0415 - only now there is a path
    import logging  # noqa: PLC0415
    import os  # noqa: PLC0415
    import signal  # noqa: PLC0415
    import socket  # noqa: PLC0415

    from resilience.checkpoint.saver.process import Saver, ignore_signals_of_the_job  # noqa: PLC0415

    os.chdir("/")
    ignore_signals_of_the_job()
    logging.basicConfig(format="resilience [saver] %(message)s")
    logging.getLogger("resilience").setLevel(logging.INFO)
    os.nice(5)
    launcher = None if settings["launcher"] < 0 else socket.socket(fileno=settings["launcher"])
    if settings["detach"] and os.fork():
        os._exit(0)  # nobody's child: whoever started us may end, or wait for all of its own
    saver = Saver(settings["socket"], launcher, settings["deadline"])
    signal.signal(signal.SIGTERM, lambda *_: saver.end_soon())
    if settings["ready"] >= 0:
        with contextlib.suppress(BrokenPipeError):  # whoever started us is gone already: all the more reason to go on
            os.write(settings["ready"], b"1")
        os.close(settings["ready"])
    saver.run()
    if settings["detach"]:  # the folder is ours, without a launcher; if others listen there, it stays
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(settings["socket"]))  # noqa: PTH106, PTH120


if __name__ == "__main__":
    main()
