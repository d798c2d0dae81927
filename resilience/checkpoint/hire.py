"""Start a saver, and find the one that is there.

Under ``resilience run`` the launcher starts it, when the first rank asks, and tells where it listens. Otherwise the first rank of
the node that needs one does, in a session of its own: it ends by itself when all ranks are gone and everything is durable.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from resilience.errors import LinkError
from resilience.pulse import channel

_BOOT = Path(__file__).with_name("saver") / "__main__.py"
_ROOT = str(Path(__file__).parents[2])  # an editable install is not on the path
_START_S = 30.0
_LONG = 50
DEADLINE_S = 600.0  # from the end of the job until a saver gives up making things durable


def start(path: str, launcher: socket.socket | None = None, deadline: float = DEADLINE_S) -> subprocess.Popen[bytes]:
    """Start a saver that listens at ``path``; return when it does. Raises :class:`LinkError`.

    With a ``launcher`` it is our child. Without one it is nobody's: it outlives us, and what is returned has ended already.
    """
    read, write = os.pipe()
    settings = {
        "path": [_ROOT, *(entry for entry in sys.path if entry and entry != _ROOT)],
        "socket": path,
        "launcher": launcher.fileno() if launcher is not None else -1,
        "ready": write,
        "detach": launcher is None,
        "deadline": deadline,
    }
    fds = (write, launcher.fileno()) if launcher is not None else (write,)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_BOOT), json.dumps(settings)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as ready:
        if not _arrives(ready.fileno()) or not ready.read(1):
            process.kill()
            process.wait()
            raise LinkError("the saver did not start; its own words are above. Nothing can be saved without it.")
    if launcher is None:
        process.wait()
    return process


def _arrives(fd: int) -> bool:
    import select  # noqa: PLC0415

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_START_S * 1000))


def private_folder() -> Path:
    """Return a folder that only this user can enter; paths of sockets may not be long."""
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < _LONG else "/tmp"
    base = Path(parent) / f"resilience-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LinkError(f"{base} can be entered by others; remove it, or set TMPDIR to a folder of your own.")
    return base


def find_or_start(run: str, directory: str) -> str:
    """Return where the saver of this job and directory listens, without a launcher; start it if there is none."""
    # A path may be any bytes, which Python has as half characters: they have no UTF-8.
    job = run.encode("utf-8", "backslashreplace") + b"\0" + os.fsencode(directory)
    name = hashlib.blake2b(job, digest_size=10).hexdigest()
    with _lock_file(f"{name}.lock") as lock:
        path = str(Path(lock.name).with_suffix(".socket"))
        deadline = time.monotonic() + _START_S
        while True:  # ranks come at the same time: one of them starts it
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LinkError(f"another rank has been starting the saver for {_START_S:g} s") from None
                time.sleep(0.02)
        if not _answers(path):
            Path(path).unlink(missing_ok=True)
            start(path)
        Path(lock.name).unlink(missing_ok=True)
    return path


def _lock_file(name: str) -> BinaryIO:
    """Open a file in the private folder, which a saver that ends takes away if it was the last to need it."""
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # gone between two of our calls
            return open(private_folder() / name, "wb")
    raise LinkError(f"{private_folder()} can't be kept: something removes it again and again.")


def _answers(path: str) -> bool:
    try:
        channel.connect(path, 5.0).close()
    except OSError:
        return False
    return True
