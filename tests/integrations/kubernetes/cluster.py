"""A corner of a real cluster for one test: a namespace, nodes, pods whose states the test sets, and controllers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilience.integrations.kubernetes.api import Api, NotFound
from resilience.integrations.kubernetes.parts import NODES, PODS, Kind

from tests.integrations.kubernetes.pods import pod

if TYPE_CHECKING:
    from tests.real.kubernetes import ApiServer

NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
EVENTS = Kind("", "v1", "events")
_MAIN = "import sys; from resilience.integrations.kubernetes.controller import main; sys.exit(main(sys.argv[1:]))"


class Cluster:
    """``name`` is the namespace's; nodes begin with it, since nodes have none."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self.server = server
        self.name = name
        self.api = Api(server.client())
        self._nodes: list[str] = []
        self._controllers: list[Running] = []
        self.api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def close(self) -> None:
        """Remove what can be seen from other tests."""
        for running in self._controllers:
            running.kill()
        for item in self.api.list_all(PODS, self.name)[0]:
            with contextlib.suppress(NotFound):
                self.api.delete(PODS, item["metadata"]["name"], self.name, grace_s=0)
        for node in self._nodes:
            with contextlib.suppress(NotFound):
                self.api.delete(NODES, node)

    def node(self, name: str, rack: str = "", **spec: Any) -> str:
        """Make a node that is ready and takes one pod; return its whole name."""
        whole = f"{self.name}-{name}"
        labels = {"kubernetes.io/hostname": whole, **({"scheduling/rack-id": f"{self.name}-{rack}"} if rack else {})}
        self.api.create(
            NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": whole, "labels": labels}, "spec": spec}
        )
        # The API server itself marks a new node as not ready; there is no controller here that would take that away.
        self.api.patch(NODES, whole, {"spec": {"taints": spec.get("taints")}})
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": None}
        room = {"cpu": "1", "memory": "1Gi", "pods": "10"}
        self.api.patch(
            NODES,
            whole,
            {"status": {"conditions": [ready], "capacity": room, "allocatable": room}},
            subresource="status",
        )
        self._nodes.append(whole)
        return whole

    def get_node(self, name: str) -> dict[str, Any]:
        """Read one."""
        return self.api.get(NODES, name)

    def pod(self, name: str, *, status: dict[str, Any] | None = None, **about: Any) -> dict[str, Any]:
        """Make a pod, see :func:`pods.pod`, and set its status as a kubelet would."""
        thing = pod(name, **about)
        said = status or thing.pop("status")
        thing["metadata"] |= {"namespace": self.name}
        for field in ("uid",):
            thing["metadata"].pop(field, None)
        made = self.api.create(PODS, thing, self.name)
        return self.say(made["metadata"]["name"], said)

    def say(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        """Set a pod's status."""
        return self.api.patch(PODS, name, {"status": status}, self.name, subresource="status")

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the pods here, by name."""
        return {item["metadata"]["name"]: item for item in self.api.list_all(PODS, self.name)[0]}

    def gone(self, name: str) -> None:
        """Take a pod away at once, as its kubelet does in the end."""
        self.api.delete(PODS, name, self.name, grace_s=0)

    def let_go(self) -> list[str]:
        """Take away every pod that is to end, as kubelets do; return their names.

        Of a pod that has failed the server writes that it is to end, and takes it away itself a moment later.
        """
        leaving = [name for name, it in self.pods().items() if it["metadata"].get("deletionTimestamp")]
        for name in leaving:
            with contextlib.suppress(NotFound):
                self.gone(name)
        return leaving

    def events(self, namespace: str = "") -> list[dict[str, Any]]:
        """Return the Events here."""
        return self.api.list_all(EVENTS, namespace or self.name)[0]

    def controller(self, folder: Path, *options: str, kubeconfig: Path | None = None) -> Running:
        """Start a real controller process that looks after this namespace and keeps its state here."""
        folder.mkdir(parents=True, exist_ok=True)
        path = kubeconfig or self.server.kubeconfig(folder / "kubeconfig")
        words = [f"--kubeconfig={path}", f"--namespace={self.name}", f"--state-namespace={self.name}", *options]
        running = Running(folder / "log", words)
        self._controllers.append(running)
        return running


class Running:
    """One controller."""

    def __init__(self, log: Path, words: list[str]) -> None:
        self._log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen([sys.executable, "-c", _MAIN, *words], stdout=out, stderr=out)

    def log(self) -> str:
        """Return what it has said."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(30)


class Forwarder:
    """A way to a port of this machine that can be cut, and mended."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"https://127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._open |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {one}
        one.close()

    def cut(self) -> None:
        """Break what is open, and take nothing new."""
        with self._lock:
            self._cut = True
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Take connections again."""
        with self._lock:
            self._cut = False

    def close(self) -> None:
        """End."""
        self.cut()
        self._listener.close()
