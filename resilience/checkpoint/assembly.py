"""How the savers of several nodes find each other: through the store that the ranks of the job share.

1) (rank 0)                    has its saver be the chair, and puts its address and a secret into the store
2) (first rank of each node)   reads that, and has its saver attend
3) (every rank)                waits until the savers of all nodes are there; then what is sealed has a common generation

It happens once per cycle, before step 0, with a deadline. The store is that of the process group if there is one, else the one that
the launcher (ours or torchrun) keeps for its workers.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from resilience import config
from resilience.checkpoint.link import Link, Place
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.checkpoint")
_POLL_S = 0.02
_SAY_EVERY_S = 10.0
_count = itertools.count()  # all ranks make their checkpoints in the same order


def assemble(link: Link, place: Place, timeout: float) -> None:
    """Have the savers of all nodes meet; sets the generation of the link. Raises ``CheckpointError`` if they do not in time."""
    key = f"resilience/chair/{next(_count)}"
    store = _store() if place.local_rank == 0 else None
    deadline = time.monotonic() + timeout
    if place.rank == 0 and store is not None:
        link.chair = link.ask({"op": "chair", "host": _own_address()})[0]
        store.set(key, json.dumps(link.chair))
    missing, said = 0, time.monotonic()
    while True:
        if place.rank != 0 and store is not None:
            _attend(link, store, key)
        answer, _ = link.ask({"op": "begun"})
        if answer["generation"]:
            link.generation = int(answer["generation"])
            return
        missing, now = int(answer["missing"]), time.monotonic()
        if now > deadline:
            raise CheckpointError(
                f"the savers of all nodes did not meet within {timeout:g} s (rank {place.rank}): {missing or 'some'} ranks of "
                f"{place.world} are missing. All ranks make a FlashCheckpoint; their nodes have to reach that of rank 0 by TCP."
            )
        if now - said > _SAY_EVERY_S:
            said = now
            _LOG.info("waiting for the other nodes to come to FlashCheckpoint (rank %s).", place.rank)
        time.sleep(_POLL_S)


def _attend(link: Link, store: distributed.Store, key: str) -> None:
    """Have our saver attend the chair that the store names, unless it does already."""
    if not store.check([key]):
        return
    found: dict[str, Any] = json.loads(store.get(key))
    if found != link.chair:
        link.ask({"op": "attend", **found})
        link.chair = found


def _store() -> distributed.Store:
    """Return the store of the job, with a short patience: whoever waits looks after other things in between."""
    if distributed.is_initialized():
        found: distributed.Store = distributed_c10d._get_default_store()
        return distributed.PrefixStore("flash", found)
    host, port = config.rank_environment().master
    try:
        return distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    except (distributed.DistError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the nodes have no store to find each other ({host}:{port}): {error}. Call init_process_group() before "
            "FlashCheckpoint."
        ) from error


def _own_address() -> str:
    """Return how other nodes reach this one: by the name of the master if that is here, else by our address on the way to it."""
    host, port = config.rank_environment().master
    family, _, _, _, address = socket.getaddrinfo(host or "localhost", port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return host if own in (address[0], "127.0.0.1", "::1") else own
