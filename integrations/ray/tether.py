"""Tie a program to the actor that starts it: ``python -m resilience.integrations.ray.tether PARENT PROGRAM …``.

Ray ends a worker by SIGKILL, and its children are not among what it ends. So the kernel does: whatever stands here gets SIGKILL
when the actor's thread that started it is gone. A launcher's monitors then end its ranks; its saver makes durable what
is complete.

Not SIGTERM: to a launcher that is the wish to stop the whole job. The signals that Ray's workers have blocked are given back first.
"""

from __future__ import annotations

import os
import signal
import sys

from resilience import kin


def main(argv: list[str]) -> None:
    """Become the program."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    kin.end_with(int(argv[0]))
    os.execv(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
