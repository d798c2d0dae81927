"""A check process: holds one device, does one task after the other, says what came of it.

1) (launcher) starts ``python -m resilience.nodecheck.process ACCELERATOR INDEX FD LAUNCHER``; it forks, and the parent only sees
   that nothing is left behind, of what an accelerator's tools start neither (:func:`resilience.kin.stand_guard`)
2) (process)  loads the accelerator, says ``{"accelerator": …, "devices": …}``, or ``{"refused": …}`` for one that can't be meant
3) (process)  imports what the tasks need, while the launcher does other things, and says ``{"ready": true}``
4) (launcher) asks ``alone``, ``serve`` and ``gather``, one JSON object per line; (process) answers each with one

Rule: whatever goes wrong in here is said as ``{"error": …}`` where it can be. Where it can't (a crash, a hang), the launcher knows
from the silence, and ends this process.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import operator
import os
import reprlib
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, SupportsIndex

from resilience import kin
from resilience.errors import ConfigError
from resilience.nodecheck import host, tasks
from resilience.nodecheck.accelerators import Accelerator, load

Message = dict[str, Any]
_LONGEST = 2000
MOST_DEVICES = 1024


class Worker:
    """One device and the store that its group meets in."""

    def __init__(self, accelerator: Accelerator, index: int) -> None:
        self._accelerator = accelerator
        self._index = index
        self._device: Any = None
        self._served: Any = None

    def answer(self, request: Message) -> Message:
        """Do what is asked for."""
        act: dict[str, Callable[[Message], Message]] = {
            "alone": self._alone,
            "serve": self._serve,
            "gather": self._gather,
        }
        return act[request["op"]](request)

    def _use(self) -> Any:
        if self._device is None:
            self._device = self._accelerator.use(self._index)
        return self._device

    def _alone(self, request: Message) -> Message:
        found = host.look(request["folder"]) if request.get("folder") else host.Findings()
        figures = tasks.gemm(self._accelerator, self._use())
        title = self._accelerator.describe(self._index)
        return {"device": title, **dataclasses.asdict(figures), "host": dataclasses.asdict(found)}

    def _serve(self, request: Message) -> Message:
        """Open the store that the group meets in; the first process of a group does."""
        from torch.distributed import TCPStore  # noqa: PLC0415

        limit = timedelta(seconds=request["timeout"])
        self._served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
        return {"port": self._served.port}

    def _gather(self, request: Message) -> Message:
        from torch.distributed import PrefixStore, TCPStore, destroy_process_group  # noqa: PLC0415

        store = self._served
        if request["rank"] > 0:
            limit = timedelta(seconds=request["timeout"])
            store = TCPStore(request["host"], request["port"], is_master=False, wait_for_workers=False, timeout=limit)
        figures = tasks.gather(
            self._accelerator,
            self._use(),
            store=PrefixStore(request["tag"], store),
            rank=request["rank"],
            world=request["world"],
            timeout=request["timeout"],
        )
        destroy_process_group()
        return dataclasses.asdict(figures)


def in_words(error: BaseException) -> str:
    """Return an error as people read it; of torch's pages of C++ the first lines."""
    said = str(error).strip()
    kind = "" if isinstance(error, (tasks.WrongResult, ConfigError)) else f"{type(error).__name__}: "
    return (kind + said)[:_LONGEST] if said else type(error).__name__


def counted(accelerator: Accelerator) -> int:
    """Return how many devices there are; raise for what can't be a number of devices. Each has a process of its own."""
    said: Any = accelerator.count()
    number = operator.index(said) if isinstance(said, SupportsIndex) else -1
    if not 0 <= number <= MOST_DEVICES:
        raise tasks.WrongResult(
            f"count() says {reprlib.repr(said)}; it must be a whole number from 0 to {MOST_DEVICES}"
        )
    return number


def main(name: str, index: int, fd: int) -> None:
    """Serve one launcher until it is gone."""
    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as line:

        def say(message: Message) -> None:
            line.write(json.dumps(message).encode() + b"\n")
            line.flush()

        try:
            accelerator = load(name)
            devices = counted(accelerator)
        except ConfigError as error:
            return say({"refused": in_words(error)})
        except ModuleNotFoundError as error:  # of a module that is there but does not load the node is at fault
            why = f"accelerator={name!r}: {in_words(error)}. Install it, or name another accelerator."
            return say({"refused": f"{why} Nothing was started."})
        except Exception as error:  # noqa: BLE001 - a plugin's boundary: what it raises is what is to be told
            return say({"error": in_words(error)})
        say({"accelerator": accelerator.name, "type": accelerator.type, "devices": devices, "pid": os.getpid()})
        try:
            importlib.import_module("torch.distributed")
        except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
            return say({"error": in_words(error)})
        say({"ready": True})
        worker = Worker(accelerator, index)
        for request in line:
            try:
                say(worker.answer(json.loads(request)))
            except Exception as error:  # noqa: BLE001 - as above
                say({"error": in_words(error)})
    return None


if __name__ == "__main__":
    kin.stand_guard(int(sys.argv[4]), int(sys.argv[3]))  # before anything is imported that has threads
    ended = 0
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except SystemExit as asked:  # by an accelerator: its code is what is to be told
        sys.stderr.write(f"it asked for its end: sys.exit({asked.code!r})\n")
        ended = asked.code & 255 if isinstance(asked.code, int) else int(asked.code is not None)
    sys.stderr.flush()
    os._exit(ended)  # a broken process group would wait for its peers
