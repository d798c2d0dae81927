"""Which of several replicas acts: the one that holds a Lease.

1) (replica) calls ``try_once()`` every few seconds, in a thread of its own
2) (replica) acts while ``leading()``; that ends by its own clock, before the others' patience does
3) (replica) calls ``stand_back()`` when it is about to end, and ``release()`` when it has, so that another one takes over at once

A holder is taken for dead when its record did not change for the lease's duration by the observer's own clock: those of hosts
are never compared. Whoever writes sends along the version it has read; of two that try at once one gets a conflict.

Hazard: a call that was sent before the lease ran out may arrive after it. So everything that is done is idempotent, and deletes and
lists that are written carry the version or the uid they are meant for.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime, timezone
from typing import Any

from resilience.integrations.kubernetes.api import Api, Conflict, Forbidden, KubernetesError, NotFound
from resilience.integrations.kubernetes.parts import Kind

_LOG = logging.getLogger("resilience.kubernetes")
LEASES = Kind("coordination.k8s.io", "v1", "leases")
LEASE_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0
_RELEASE_S = 1.0  # whoever ends does not wait for long to be polite


class Election:
    """One replica's part in it. ``name`` is the Lease's, ``me`` the replica's."""

    def __init__(self, api: Api, namespace: str, name: str, me: str, lease_s: float = LEASE_S) -> None:
        self._api = api
        self._namespace, self._name, self._me = namespace, name, me
        self._lease_s = lease_s
        self._renew_s = lease_s * RENEW_S / LEASE_S
        self._retry_s = lease_s * RETRY_S / LEASE_S
        self._seen: tuple[str, str, float] = ("", "", 0.0)  # holder, version, when by our clock
        self._until = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self._said = ""

    def start(self) -> None:
        """Take part from now on."""
        self._thread.start()

    def leading(self) -> bool:
        """Whether this replica may act now."""
        return time.monotonic() < self._until

    @property
    def other(self) -> str:
        """Return which other replica had the lease when it was last looked at; empty where none had."""
        return self._seen[0] if self._seen[0] != self._me else ""

    def stand_back(self) -> None:
        """Neither take nor renew the lease any more."""
        self._stop.set()

    def release(self) -> None:
        """Stand back, and let another one take over."""
        self.stand_back()
        if self._thread.is_alive():
            self._thread.join(_RELEASE_S)
        if not self.leading():
            return
        self._until = 0.0
        api = self._api.within(_RELEASE_S)
        try:
            lease = api.get(LEASES, self._name, self._namespace)
            if lease["spec"].get("holderIdentity") == self._me:
                api.replace(LEASES, self._written(lease, holder=""), self._namespace)
        except KubernetesError as error:
            _LOG.info("the lease was not given back (%s); it runs out by itself.", error)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.try_once()
            except KubernetesError as error:
                if str(error) != self._said:
                    self._said = str(error)
                    loud = logging.ERROR if isinstance(error, Forbidden) else logging.WARNING
                    _LOG.log(loud, "the lease %s/%s can't be had: %s", self._namespace, self._name, error)
            except Exception:  # noqa: BLE001 - a thread's boundary: who stops trying never leads again
                _LOG.exception("the lease %s/%s can't be had; it is tried again.", self._namespace, self._name)
            self._stop.wait(self._retry_s)

    def try_once(self) -> bool:
        """Take or renew the lease if that is possible now. Raises :class:`KubernetesError` where the server does not answer."""
        asked = time.monotonic()
        try:
            lease = self._api.get(LEASES, self._name, self._namespace)
        except NotFound:
            lease = None
        if lease is not None and not self._may_take(lease, asked):
            return False
        try:
            if lease is None:
                self._api.create(LEASES, self._written({}, self._me), self._namespace)
            else:
                self._api.replace(LEASES, self._written(lease, self._me), self._namespace)
        except Conflict:  # another replica was quicker
            return False
        if not self.leading():
            _LOG.info("this replica (%s) leads.", self._me)
        self._until, self._said = asked + self._renew_s, ""
        return True

    def _may_take(self, lease: dict[str, Any], now: float) -> bool:
        holder = str(lease.get("spec", {}).get("holderIdentity") or "")
        version = str(lease["metadata"]["resourceVersion"])
        if (holder, version) != self._seen[:2]:
            self._seen = (holder, version, now)
        if holder in ("", self._me):
            return True
        patience = float(lease["spec"].get("leaseDurationSeconds") or self._lease_s)
        return now - self._seen[2] > patience

    def _written(self, lease: dict[str, Any], holder: str) -> dict[str, Any]:
        spec = dict(lease.get("spec") or {})
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + bool(lease)
        spec.update(holderIdentity=holder, renewTime=now, leaseDurationSeconds=max(1, round(self._lease_s)))
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": lease.get("metadata") or {"name": self._name, "namespace": self._namespace},
            "spec": spec,
        }
