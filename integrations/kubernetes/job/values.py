"""What a training job is made from: every value, what it means, and what it may be.

Rule: the dataclass is the one list. Flags, the keys of a values file and the documentation come from it; an unknown key raises and
names the nearest.

Hazard: snapshots live in memory that counts against the container's limit. A limit without them is a job that is killed at step 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resilience.integrations import flags
from resilience.integrations import values as schema
from resilience.integrations.kubernetes import words
from resilience.integrations.kubernetes.podgroups import PodGroup, PodGroupError
from resilience.integrations.kubernetes.podgroups.schedulers import SCHEDULERS
from resilience.integrations.values import ValuesError, settle, value

from resilience.errors import nearest
from resilience.groups import topology

NO_GANG = "none"
_OF_THE_GANG = ("scheduler_name", "queue", "priority", "controller")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([EPTGMk]i?|Ki|m|)")
_SCALE = {"": 1.0, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SCALE |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}
FROM_THE_POD = {
    "RESILIENCE_NODE_NAME": "spec.nodeName",  # a node that is marked, excluded or counted is one of the cluster's
    "POD_NAME": "metadata.name",
    "POD_IP": "status.podIP",
    "JOB_UID": "metadata.labels['controller-uid']",  # the one with a prefix came with Kubernetes 1.27
    "RESILIENCE_NODE_GROUP": f"metadata.labels['{topology.NAME_LABEL}']",  # empty where the Pod has none
    "RESILIENCE_NODE_GROUP_INDEX": f"metadata.labels['{topology.INDEX_LABEL}']",
}
"""Variables of the container that the rendered job sets itself, and the field of the Pod that each is of."""
_LONGEST = 63  # of a host name
_LEAST_MEMORY = 64 * 1024.0**2
_FORMS = {"image": words.image, "namespace": words.namespace, "gpu_resource": words.label_key}
_FORMS |= dict.fromkeys(
    ("service_account", "priority_class", "storage_class", "checkpoint_claim", "scheduler_name"), words.name
)
_OURS = {"nnodes": "nodes, and min_nodes,", "nproc-per-node": "nproc_per_node", "max-restarts": "max_restarts"}
_LAUNCHER = {flag: f"give {name} instead" for flag, name in (_OURS | {"ft-stop-grace": "stop_grace"}).items()}
_LAUNCHER |= dict.fromkeys(
    ("rdzv-endpoint", "rdzv-backend", "rdzv-id", "standalone", "master-addr", "master-port"),
    "the Pods meet at their own Service, or at store; leave it out",
)
_LAUNCHER |= {"node-rank": "a Pod has the rank of its index; leave it out"}
_LAUNCHER |= {"ft-termination-log": "the controller reads the Pod's own termination message; leave it out"}


@dataclass(frozen=True)
class JobValues:
    """A training job. ``name``, ``image`` and ``script`` are needed; everything else has a default that runs."""

    name: str = value("", "of the Job, and of its Service and its PodGroup where it has them")
    image: str = value("", "container image with the script, torch and resilience-sdk in it")
    script: tuple[str, ...] = value(
        (), "the training script and its arguments, as after `resilience run`; a list, or one line"
    )
    namespace: str = value(
        "", "empty: the current one; a rack that is left is then only avoided where that is 'default'"
    )
    nodes: int = value(1, "Pods, one launcher in each")
    min_nodes: int = value(0, "the job may go on with so few; 0: it needs all")
    nproc_per_node: int = value(0, "ranks in each Pod; 0: one for each GPU, or one")
    gpus_per_node: int = value(0, "GPUs of each Pod")
    gpu_resource: str = value("nvidia.com/gpu", "what the cluster calls a GPU")
    cpu: str = value("4", "processors of each Pod")
    memory: str = value("8Gi", "memory of each Pod for training itself, without snapshots and shared memory")
    snapshot_state: str = value(
        "0", "size of what FlashCheckpoint saves in one Pod, all its ranks together; its slots are added to memory"
    )
    slots: int = value(0, "FlashCheckpoint(slots=…); 0: its default, 3, with replicas 4")
    replicas: int = value(0, "FlashCheckpoint(replicas=…): copies of other nodes' snapshots are added to memory")
    shm: str = value("1Gi", "size of /dev/shm, for data loaders and NCCL, added to memory; 0: the runtime's 64 MiB")
    max_restarts: int = value(10, "--max-restarts of the launcher")
    stop_grace: int = value(60, "--ft-stop-grace, in seconds; the Pod's termination grace is longer by 30 s")
    port: int = value(29400, "of the rendezvous")
    store: str = value("", "HOST:PORT of a `resilience store`; empty: Pod 0 has the store")
    network_check: bool = value(False, "check every node before each start; a faulty one ends with 80 and never trains")
    accelerator: str = value("", "what is checked: cpu, nvidia, ascend or your own; empty: what torch finds")
    launcher_args: tuple[str, ...] = value((), "more flags for `resilience run`; a list, or one line")
    env: Mapping[str, str] = value({}, "environment variables of the container")
    checkpoint_claim: str = value("", "PersistentVolumeClaim for checkpoints that is there already")
    checkpoint_size: str = value("", "make a PersistentVolumeClaim of this size for checkpoints")
    storage_class: str = value("", "of that claim; empty: the cluster's default")
    checkpoint_path: str = value("/checkpoints", "where checkpoints are mounted; reports go below it too")
    gang: str = value(
        NO_GANG,
        "gang scheduler of the cluster: t9k, coscheduling, volcano; none: Pods are placed one by one, on any cluster",
    )
    scheduler_name: str = value("", "its schedulerName, where that is not the usual one")
    queue: str = value("default", "of the PodGroup")
    priority: int = value(-1, "of the PodGroup, 0 to 100; -1: the scheduler's default")
    controller: bool = value(False, "`resilience kubernetes controller` runs in the cluster and makes the PodGroup")
    backoff_limit: int = value(-1, "Pods that may fail in ways that are counted; -1: three for each node")
    active_deadline: int = value(0, "seconds after which the Job is ended whatever it does; 0: none")
    ttl_after_finished: int = value(0, "seconds after which a finished Job is deleted; 0: it stays")
    node_selector: Mapping[str, str] = value({}, "labels of the nodes to run on")
    priority_class: str = value("", "priorityClassName of the Pods")
    service_account: str = value("", "of the Pods; they need no rights")
    image_pull_policy: str = value("IfNotPresent", "Always, IfNotPresent or Never")
    image_pull_secrets: tuple[str, ...] = value((), "names of Secrets")

    def __post_init__(self) -> None:
        settle(self, needed=("name", "image", "script"))
        self._check_numbers()
        self._check_names()
        self._check_forms()
        flags.check(self.launcher_args, self.env)
        for word in self.launcher_args:
            if found := flags.undone(word, _LAUNCHER):
                raise ValuesError(f"launcher_args has {word!r}: {_LAUNCHER[found]}.")

    def _check_names(self) -> None:
        last = f"{self.name}-{self.nodes - 1}"
        if not _NAME.fullmatch(self.name) or len(last) > _LONGEST:
            raise ValuesError(
                f"name {self.name!r} can't be used: small letters, digits and '-', a letter first, and with the number of the "
                f"last Pod at most {_LONGEST} characters, since it is a host name ({last!r} has {len(last)})."
            )
        if self.gang != NO_GANG and self.gang not in SCHEDULERS:
            known = [*SCHEDULERS, NO_GANG]
            raise ValuesError(f"gang {self.gang!r} is unknown.{nearest(self.gang, known)} Known: {', '.join(known)}.")
        for item in dataclasses.fields(self):
            told = getattr(self, item.name)
            if self.gang == NO_GANG and item.name in _OF_THE_GANG and told != item.default:
                raise ValuesError(
                    f"{item.name} is {told!r}, which is for a gang scheduler, and gang is {NO_GANG!r}: give gang, or leave "
                    f"{item.name} out."
                )
        if self.accelerator and not self.network_check:
            raise ValuesError(
                f"accelerator is {self.accelerator!r}, which says what is checked, and network_check is off: switch it on, or "
                "leave accelerator out."
            )
        if self.image_pull_policy not in ("Always", "IfNotPresent", "Never"):
            raise ValuesError(f"image_pull_policy {self.image_pull_policy!r}: Always, IfNotPresent or Never.")
        if self.checkpoint_claim and self.checkpoint_size:
            raise ValuesError(
                "checkpoint_claim names a claim that is there, checkpoint_size makes one: give one of them."
            )
        if not self.checkpoint_path.startswith("/"):
            raise ValuesError(f"checkpoint_path {self.checkpoint_path!r} must be absolute.")
        if self.checkpoint_path.rstrip("/") in ("", "/dev", "/dev/shm"):
            raise ValuesError(
                f"checkpoint_path {self.checkpoint_path!r} is taken: give a folder of its own, such as /checkpoints."
            )
        host, _, port = self.store.rpartition(":")
        if self.store and not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
            raise ValuesError(f"store {self.store!r}: write HOST:PORT, as `resilience store` prints it.")
        if self.gang != NO_GANG:
            self.group()

    def _check_forms(self) -> None:
        """Raise for words that the API server would refuse, or that would make one kind of thing of a job and not the other."""
        told = [(name, getattr(self, name), form) for name, form in _FORMS.items() if getattr(self, name)]
        told += [("image_pull_secrets", name, words.name) for name in self.image_pull_secrets]
        told += [("env", name, words.variable) for name in self.env]
        for name in FROM_THE_POD.keys() & self.env.keys():
            raise ValuesError(f"env: {name} is taken: the job sets it itself, from its Pod. Leave it out.")
        for key, text in self.node_selector.items():
            told += [("node_selector", key, words.label_key), ("node_selector", text, words.label_value)]
        for name, text, form in told:
            try:
                form(text)
            except argparse.ArgumentTypeError as error:
                raise ValuesError(f"{name}: {error}.") from error

    def _check_numbers(self) -> None:
        least = {"nodes": 1, "nproc_per_node": 0, "gpus_per_node": 0, "slots": 0, "replicas": 0, "max_restarts": 0}
        least |= {"stop_grace": 1, "min_nodes": 0, "active_deadline": 0, "ttl_after_finished": 0, "backoff_limit": -1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValuesError(f"{name} is {getattr(self, name)}: it must be at least {lowest}.")
        if self.min_nodes > self.nodes:
            raise ValuesError(f"min_nodes is {self.min_nodes}, above nodes, {self.nodes}.")
        if not 0 < self.port < 65536:
            raise ValuesError(f"port {self.port} is no port.")
        if self.replicas and self.nodes < 2:
            raise ValuesError("replicas are copies on other nodes, and nodes is 1.")
        for name in ("cpu", "memory", "snapshot_state", "shm"):
            quantity(getattr(self, name), name)
        if quantity(self.cpu, "cpu") <= 0:
            raise ValuesError(f"cpu is {self.cpu}: a Pod needs some.")
        if quantity(self.memory, "memory") < _LEAST_MEMORY:
            raise ValuesError(f"memory is {self.memory}, in bytes: torch alone takes more. Write 8Gi, or 500M.")
        if self.checkpoint_size:
            quantity(self.checkpoint_size, "checkpoint_size")

    @property
    def ranks(self) -> int:
        """Return how many ranks run in each Pod."""
        return self.nproc_per_node or self.gpus_per_node or 1

    @property
    def snapshot_bytes(self) -> int:
        """Return how much memory of a Pod its snapshots take: its slots, and two copies for each replica that it keeps."""
        slots = self.slots or (4 if self.replicas else 3)
        return int(quantity(self.snapshot_state, "snapshot_state") * (slots + 2 * self.replicas))

    @property
    def memory_bytes(self) -> int:
        """Return the memory of a Pod, everything included."""
        return int(quantity(self.memory, "memory") + quantity(self.shm, "shm")) + self.snapshot_bytes

    def group(self) -> PodGroup:
        """Return the group that the Pods start in."""
        priority = None if self.priority < 0 else self.priority
        try:
            return PodGroup(self.name, self.min_nodes or self.nodes, self.queue, priority, namespace=self.namespace)
        except PodGroupError as error:
            raise ValuesError(str(error)) from error


def documentation() -> dict[str, str]:
    """Return what each value means."""
    return schema.documentation(JobValues)


def from_mapping(given: Mapping[str, Any], source: str = "values") -> JobValues:
    """Return the values in a mapping; raise for a key that there is not."""
    return schema.from_mapping(JobValues, given, source)


def quantity(text: str, name: str) -> float:
    """Return a Kubernetes quantity as a number."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValuesError(f"{name} {text!r} is no quantity: write 500m, 4, 16Gi, 200G.")
    return float(found[1]) * _SCALE[found[2]]
