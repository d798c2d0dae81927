"""A real Ray cluster on this host, in a process of its own: a head without room, and as many nodes as are asked for.

    python -m tests.real.ray_cluster FD RACKS      reads orders as JSON lines from stdin, answers on a file descriptor

Everything stays on loopback, and lost nodes are found in seconds. When stdin closes everything is stopped.

A cluster that grows has Ray's own autoscaler, with a kind of node for each rack, and a provider of Ray's that starts them here.
Hazard: Ray's ``AutoscalingCluster`` would do that too, but begins with ``ray stop``, which ends all clusters of this host; and it
needs a file that Ray's wheels do not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
_QUICK = {  # a killed node is found in 5 s; one that only has a busy host has 15
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "health_check_timeout_ms": 3000,
}
_OBJECTS = 80_000_000
_STOP_S = 60.0
_HEAD = f"{0:0>5}".rjust(56, "f")  # what the provider calls the head, and its kind
_KIND = "ray.head.default"


class RayCluster:
    """The cluster, from outside. ``grows``: at most so many more nodes of each rack, when they are asked for."""

    def __init__(self, **grows: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rc-"))  # short: Ray's sockets live in it
        self._grows = bool(grows)
        (self.folder / "ray").mkdir()
        answers, theirs = os.pipe()
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.real.ray_cluster", str(theirs), json.dumps(grows)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs,),
            env={**os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(self.folder)},
            cwd=Path(__file__).parent.parent.parent,
            text=False,
            start_new_session=True,
        )
        os.close(theirs)
        self._answers = os.fdopen(answers, "r")
        self.address = str(self._next())
        self._racks: dict[str, str] = {}  # of the live nodes

    def connect(self) -> None:
        """Have this process connected to it, and to no other."""
        import ray

        if ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address:
            return
        ray.shutdown()
        ray.init(address=self.address, log_to_driver=False, configure_logging=False)

    def have(self, **racks: int) -> None:
        """Have at least so many nodes of each rack."""
        for rack, number in racks.items():
            for _ in range(number - list(self._racks.values()).count(rack)):
                self.add(RACK_ID=rack)

    def some(self, number: int) -> None:
        """Have at least so many nodes, wherever they are; a cluster that grows has them when they are asked for."""
        for _ in range(0 if self._grows else number - len(self._racks)):
            self.add(RACK_ID="a")

    def head(self) -> str:
        """Return the id of the node that is the cluster's head."""
        import ray

        return next(str(it["NodeID"]) for it in ray.nodes() if "node:__internal_head__" in it["Resources"])

    def has(self, node: str) -> bool:
        """Whether a node that was added is still there."""
        return node in self._racks

    def add(self, variables: dict[str, str] | None = None, cpus: int = 1, **labels: str) -> str:
        """Start one more node, with room for one launcher, and variables in its environment; return its id."""
        node = str(self._ask({"add": labels, "cpus": cpus, "variables": variables or {}}))
        self._racks[node] = labels.get("RACK_ID", "")
        return node

    def kill(self, node: str) -> None:
        """Kill a node: its raylet gets SIGKILL."""
        self._ask({"remove": node, "gently": False})
        del self._racks[node]

    def remove(self, node: str) -> None:
        """Take a node away, so that the cluster knows it at once."""
        self._ask({"remove": node, "gently": True})
        del self._racks[node]

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._next()

    def _next(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise AssertionError(f"the cluster's process ended:\n{(self.folder / 'log').read_text()[-4000:]}")
        return json.loads(line)

    def close(self) -> None:
        """Stop everything, and leave nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pid in self._stragglers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._answers.close()
        self._log.close()
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

    def _stragglers(self) -> list[int]:
        """Return what is left of it, as nodes that the autoscaler has started: whoever is told of its folder, or has a file of it
        open, for Ray's agents overwrite their environment with their title."""
        mark, found = f"RAY_TMPDIR={self.folder}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") or self._opened(entry):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def _opened(self, process: Path) -> bool:
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it may be closed by now
                if self.folder in file.readlink().parents:
                    return True
        return False


def growing(racks: dict[str, int]) -> dict[str, Any]:
    """Return what the head of a cluster that grows is told, and have what its autoscaler reads from the environment there."""
    os.environ.update(RAY_FAKE_CLUSTER="1", RAY_enable_autoscaler_v2="1", AUTOSCALER_UPDATE_INTERVAL_S="1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nothing: dict[str, Any] = {"node_config": {}, "min_workers": 0}
    room = {"CPU": 1, "object_store_memory": _OBJECTS}
    kinds = {
        rack: {"resources": room, "labels": {"RACK_ID": rack}, "max_workers": most, **nothing}
        for rack, most in racks.items()
    }
    config = {
        "cluster_name": "grows",
        "max_workers": sum(racks.values()),
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": _HEAD,
            "launch_multiple": True,
            "disable_node_updaters": True,
        },
        "available_node_types": {_KIND: {"resources": {"CPU": 0}, "max_workers": 0, **nothing}, **kinds},
        "head_node_type": _KIND,
        "idle_timeout_minutes": 30,
        **{
            key: {} for key in ("auth", "docker", "file_mounts")
        },  # what the autoscaler reads, and this provider does not need
        **{key: [] for key in ("cluster_synced_files", "initialization_commands", "rsync_exclude", "rsync_filter")},
        **{f"{who}setup_commands": [] for who in ("", "head_", "worker_")},
        **{f"{who}_start_ray_commands": [] for who in ("head", "worker")},
    }
    path = Path(os.environ["RAY_TMPDIR"]) / "autoscaler.json"
    path.write_text(json.dumps(config))
    variables = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD, "RAY_CLOUD_INSTANCE_ID": _HEAD}
    return {"autoscaling_config": str(path), "gcs_server_port": port, "env_vars": variables}


def serve(answers: int, grows: dict[str, int]) -> None:
    """Run a cluster until stdin closes."""
    more = growing(grows) if grows else {}
    from ray.cluster_utils import Cluster

    arguments = {"node_ip_address": "127.0.0.1", "object_store_memory": _OBJECTS}
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "_system_config": _QUICK,
        **arguments,
        **more,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes: dict[str, Any] = {}
    with os.fdopen(answers, "w") as out:

        def answer(what: Any) -> None:
            out.write(json.dumps(what) + "\n")
            out.flush()

        answer(cluster.address)
        for line in sys.stdin:
            order = json.loads(line)
            if "add" in order:
                known = {"labels": order["add"], "env_vars": order["variables"]}
                node = cluster.add_node(num_cpus=order["cpus"], **known, **arguments)
                nodes[node.node_id] = node
                answer(node.node_id)
            else:
                cluster.remove_node(nodes.pop(order["remove"]), allow_graceful=order["gently"])
                answer("removed")
        cluster.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
