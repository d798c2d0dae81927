"""A rendezvous whose workers get a fresh store in every round.

torch 2.13 keeps one TCP store for the workers of all rounds. After a restart they find the keys of their dead
predecessors there: gloo connects to ports nobody listens on, and the restart fails or hangs (plain torchrun's
often does, on two ranks). It also never tells a newly joined node where that store is. So node 0 opens a new store
for each round, and publishes its address below the round's own prefix, where every node of the round finds it.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from resilience import config

_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def rank_0_hosts_the_store() -> bool:
    """Whether the user wants it so, with torch's own variable."""
    return config.environment().get(_NOT_SHARED) == "1"


class FreshStores(RendezvousHandler):  # type: ignore[misc]  # torch is untyped here
    """Wraps any rendezvous handler; everything but the workers' store is the wrapped one's."""

    def __init__(self, inner: RendezvousHandler, local_addr: str | None) -> None:
        self._inner = inner
        self._local_addr = local_addr or socket.getfqdn()
        self._server: TCPStore | None = None
        self._rounds = 0
        self._as_torch = rank_0_hosts_the_store()

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return not self._as_torch

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self._rounds += 1
        if self._as_torch:
            return self._inner.next_rendezvous()
        if self.get_backend() == "static":
            info = self._inner.next_rendezvous()
            # Its nodes never meet again, so only a single node can move to a new store after its first round.
            return info if info.world_size > 1 or self._rounds == 1 else self._with_fresh_store(info)
        config.tell_workers({_NOT_SHARED: "1"})  # torch then builds nothing that would outlive the round
        try:
            info = self._inner.next_rendezvous()
        finally:
            config.tell_workers({_NOT_SHARED: None})
        return self._with_fresh_store(info)

    def _with_fresh_store(self, info: RendezvousInfo) -> RendezvousInfo:
        port: int | None = None
        if info.rank == 0:
            self._server = TCPStore(host_name=self._local_addr, port=0, is_master=True, multi_tenant=True)
            port = self._server.port
        store = _Prefixed(info.store)
        bootstrap = RendezvousStoreInfo.build(info.rank, store, local_addr=self._local_addr, server_port=port)
        return RendezvousInfo(info.store, info.rank, info.world_size, bootstrap)

    def get_backend(self) -> str:
        """See base class."""
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        """See base class."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """See base class."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """See base class."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """See base class."""
        return bool(self._inner.shutdown())


class OneNode(RendezvousHandler):  # type: ignore[misc]  # torch is untyped here
    """The rendezvous of a job that can't have a second node: there is nobody to meet.

    torch's own waits a random 0 to 0.3 s, so that nodes do not all come at once, and keeps a state alive in a store.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = HashStore()
        self._round = -1
        self._closed = False

    def get_backend(self) -> str:
        """See base class."""
        return "c10d"

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous {self._run_id!r} is closed")
        self._round += 1
        store = PrefixStore(f"{self._run_id}.{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """See base class."""
        return self._closed

    def set_closed(self) -> None:
        """See base class."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        self._closed = True
        return True


class _Prefixed:
    """The round's store below a prefix of ours: torch has put its own address under the same names already."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(f"resilience/workers/{key}", value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(f"resilience/workers/{key}"))
