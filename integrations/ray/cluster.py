"""Everything that is asked of Ray: what is there, and that it be as a job's state says.

A claim is a placement group of one bundle, with an actor in it; both have the claim's name, and are detached, so that a supervisor
that was restarted finds them. What has a name of this job and is not wanted is removed.

Hazard: an answer may be that of a worker which is dead by now. Each tells its life, and an order goes only to the life it is for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from resilience.integrations.ray import claims, layout, memory, options
from resilience.integrations.ray.layout import Node
from resilience.integrations.ray.names import claim_name, is_claim_of
from resilience.integrations.ray.node import NodeAgent
from resilience.integrations.ray.patience import DEAD, Patience
from resilience.integrations.ray.plan import ClaimSeen, Seen
from resilience.integrations.ray.spec import JobSpec
from resilience.integrations.ray.state import Phase, Slot, State
from resilience.integrations.ray.store import StoreKeeper

LONG_POLL_S = 20.0
_HEAD = "node:__internal_head__"
_DRIVER_EVERY_S = 1.0
_LONGEST = 300  # characters of an error
_NO_GROUP = "somebody has removed its placement group"


def nodes(bundle: Any) -> tuple[Node, ...]:
    """Return the live nodes of the cluster."""
    free = ray._private.state.available_resources_per_node()
    leaving = ray._private.state.state.get_draining_nodes()
    return tuple(
        Node(
            it["NodeID"],
            it["NodeManagerAddress"],
            dict(it["Labels"]),
            all(free.get(it["NodeID"], {}).get(name, 0.0) >= amount for name, amount in bundle.items()),
            it["NodeID"] in leaving,
            _HEAD in it["Resources"],
            {name: amount for name, amount in it["Resources"].items() if not name.startswith("node:")},
        )
        for it in ray.nodes()
        if it["Alive"]
    )


def driver_gone(job_id: str) -> bool:
    """Return whether the program that has this Ray job id is gone."""
    known = {it["JobID"]: it["IsDead"] for it in ray._private.state.jobs()}
    return bool(known.get(job_id, True))


class Hands:
    """A supervisor's eyes and hands, for one job."""

    def __init__(self, spec: JobSpec, submission: memory.Submission) -> None:
        self._spec, self._submission = spec, submission
        self._actors: dict[int, Any] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._calls: dict[Any, int] = {}  # reports that are awaited; 0 is the store's
        self._gone: dict[int, str] = {}
        self._patience = Patience()
        self._delivered: dict[int, tuple[int, bool]] = {}
        self._store: Any = None
        self._store_round = 0
        self._store_said: dict[str, Any] | None = None
        self._store_lost = False
        self._driver_seen, self._driver_gone = 0.0, False
        self._nodes: tuple[Node, ...] = ()
        self._table: dict[str, dict[str, Any]] | None = None  # of placement groups, as it was just looked at
        self._grace_s = 0.0

    # -- eyes

    def look(self, state: State) -> Seen:
        """Return what is to be seen now."""
        self._nodes = nodes(self._spec.bundle)
        self._ask(state)
        self._give_up_the_silent()
        groups = self._table = self._groups()
        placed = {name: it for name, it in groups.items() if it["state"] == "CREATED"}
        known = {}
        for slot in state.slots:
            if not slot.claim:
                continue
            said = self._reports.get(slot.claim, {})
            bare = _NO_GROUP if slot.node and self._name(slot.claim) not in groups else ""
            group = placed.get(self._name(slot.claim))
            known[slot.claim] = ClaimSeen(
                str(next(iter(group["bundles_to_node_id"].values()))) if group else "",
                str(said.get("life", "")),
                int(said.get("launch", 0)),
                said.get("code"),
                self._gone.get(slot.claim, bare),
                str(said.get("why", "")),
            )
        here = self._store_round == state.round
        endpoint = str(self._store_said["endpoint"]) if here and self._store_said is not None else ""
        stop = memory.stop_asked(self._spec.name, self._submission.token)
        lost = here and self._store_lost
        return Seen(self._nodes, known, endpoint, lost, stop, self._driver_is_gone(), self._grace_s)

    def wait(self, seconds: float) -> None:
        """Wait until an actor says something new, at most so long."""
        if not self._calls:
            time.sleep(seconds)
            return
        ray.wait(list(self._calls), timeout=seconds)
        for call in self._ready():
            self._hear(call, self._calls.pop(call))

    def _ready(self) -> list[Any]:
        """Return the questions that are answered, all of them: one per turn would leave thousands of actors unheard."""
        calls = list(self._calls)
        return list(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else []

    def _ask(self, state: State) -> None:
        """Have a question open with every actor."""
        asked = set(self._calls.values())
        for slot in state.slots:
            actor = self._actors.get(slot.claim)
            if actor is not None and slot.claim not in asked and slot.claim not in self._gone:
                version = self._reports.get(slot.claim, {}).get("version", -1)
                self._calls[actor.report.remote(version, LONG_POLL_S)] = slot.claim
                self._patience.asked(slot.claim, time.monotonic())
        if self._store is not None and 0 not in asked and not self._store_lost:
            wait_s = 0.0 if self._store_said is None else LONG_POLL_S
            self._calls[self._store.report.remote(wait_s)] = 0
            self._patience.asked(0, time.monotonic())

    def _give_up_the_silent(self) -> None:
        """Hold those for gone that Ray holds for alive, and that do not answer."""
        answered = set(self._ready())
        for call, claim in [(call, claim) for call, claim in self._calls.items() if call not in answered]:
            actor = self._actors.get(claim) if claim else self._store
            why = actor is not None and self._patience.is_over(claim, time.monotonic(), lambda it=actor: _stands(it))
            if not why:
                continue
            del self._calls[call]
            self._patience.answered(claim)
            if claim:
                self._gone[claim] = why
            else:
                self._store_lost = True

    def _hear(self, call: Any, claim: int) -> None:
        self._patience.answered(claim)
        try:
            said = ray.get(call)
        except ActorUnavailableError:
            # It is being restarted, or out of reach for a moment: then an order may not have arrived.
            self._reports.pop(claim, None)
            self._delivered.pop(claim, None)
        except RayError as error:  # whatever it is, it is that actor's: the others are looked after
            self._reports.pop(claim, None)
            self._gone[claim] = said_of(error)
            self._store_lost |= claim == 0
        else:
            if claim:
                self._reports[claim] = said
                self._grace_s = max(self._grace_s, said["grace_s"] or 0.0)
            else:
                self._store_said = said
                self._store_lost = said["code"] is not None or not said["endpoint"]

    def _driver_is_gone(self) -> bool:
        if self._submission.driver and time.monotonic() - self._driver_seen > _DRIVER_EVERY_S:
            self._driver_seen = time.monotonic()
            self._driver_gone = driver_gone(self._submission.driver)
        return self._driver_gone

    def _groups(self) -> dict[str, dict[str, Any]]:
        return {
            it["name"]: {**it, "id": key}
            for key, it in placement_group_table().items()
            if is_claim_of(self._spec.name, it["name"]) and it["state"] != "REMOVED"
        }

    # -- hands

    def make_so(self, state: State, sign: Callable[[], None]) -> tuple[bool, set[int]]:
        """Have everything as the state says; return whether nothing was left to remove, and the claims that were made. It may take
        minutes for many nodes: ``sign`` is called in between."""
        wanted = {slot.claim: slot for slot in state.slots if slot.claim}
        groups, self._table = self._groups() if self._table is None else self._table, None
        clean = self._remove_what_is_not_wanted(groups, wanted, 0 if state.phase.over else state.round, sign)
        label = self._spec.groups.label if self._spec.groups is not None else None
        avoid = claims.to_avoid(state, self._nodes, label)
        new = {claim: slot for claim, slot in wanted.items() if claim not in self._actors}
        for claim, slot in new.items():
            sign()
            rack = state.racks[slot.group] if label is not None else ""
            selector = layout.selector(self._spec.labels, label, rack, slot.pinned, avoid)
            self._actors[claim] = self._claimed(self._name(claim), groups, selector)
        if state.round and not state.phase.over:
            self._have_store(state)
        for claim, slot in wanted.items():
            self._order(state, claim, slot)
        return clean, {claim for claim in new if self._name(claim) not in groups}

    def _remove_what_is_not_wanted(
        self, groups: Mapping[str, Any], wanted: dict[int, Slot], round_: int, sign: Callable[[], None]
    ) -> bool:
        keep = {self._name(claim) for claim in wanted} | ({self._name(f"store-{round_}")} if round_ else set())
        unwanted = [it for name, it in groups.items() if name not in keep]
        named = [it["name"] for it in list_named_actors(all_namespaces=True) if it["namespace"] == memory.NAMESPACE]
        actors = [name for name in named if is_claim_of(self._spec.name, name) and name not in keep]
        for name in actors:
            sign()
            with contextlib.suppress(ValueError, RayError):
                ray.kill(ray.get_actor(name, namespace=memory.NAMESPACE), no_restart=True)
        for it in unwanted:
            sign()
            remove_placement_group(_group(it["id"]))
        for claim in [claim for claim in self._actors if claim not in wanted]:
            for table in (self._actors, self._reports, self._delivered):
                table.pop(claim, None)
        return not unwanted and not actors

    def _claimed(self, name: str, groups: Mapping[str, Any], selector: dict[str, str]) -> Any:
        """Return the actor of a claim, and have it and its placement group made where they are not there yet."""
        bundle = dict(self._spec.bundle)
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, namespace=memory.NAMESPACE)
        if name in groups:
            group = _group(groups[name]["id"])
        else:
            selectors = [selector] if selector else None
            group = placement_group([bundle], name=name, lifetime="detached", bundle_label_selector=selectors)
        return (
            ray.remote(NodeAgent)
            .options(
                name=name,
                namespace=memory.NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=8,
                num_cpus=bundle.pop("CPU", 0.0),
                num_gpus=bundle.pop("GPU", 0.0),
                memory=bundle.pop("memory", None),
                resources=bundle,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(self._spec.name)
        )

    def _have_store(self, state: State) -> None:
        if self._store_round == state.round:
            return
        name = self._name(f"store-{state.round}")
        self._store, self._store_round, self._store_said, self._store_lost = None, state.round, None, False
        for call in [call for call, claim in self._calls.items() if claim == 0]:
            del self._calls[call]
        self._patience.answered(0)
        try:
            self._store = ray.get_actor(name, namespace=memory.NAMESPACE)
            return
        except ValueError:
            if state.endpoint:  # it was there, and was lost while no supervisor looked
                self._store_lost = True
                return
        training = [slot.node for slot in state.slots]
        home = layout.home_of_the_store(self._nodes, training)
        address = next((node.address for node in self._nodes if node.id == home), "127.0.0.1")
        strategy = NodeAffinitySchedulingStrategy(home, soft=False) if home else None
        self._store = (
            ray.remote(StoreKeeper)
            .options(
                name=name,
                namespace=memory.NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            .remote(address)
        )

    def _order(self, state: State, claim: int, slot: Slot) -> None:
        """Tell a launcher's actor what is wanted of it, where it does not know it yet."""
        said = self._reports.get(claim)
        stop = slot.leave or state.phase is Phase.STOPPING
        order = (slot.launch, stop)
        if not slot.launch or said is None or said["life"] != slot.life or self._delivered.get(claim) == order:
            return
        self._delivered[claim] = order
        grouped = self._spec.groups is not None
        address = next((node.address for node in self._nodes if node.id == slot.node), "127.0.0.1")
        post = options.Post(
            slot.rank, slot.node, address, slot.group if grouped else None, state.racks[slot.group] if grouped else ""
        )
        run_id = f"{self._spec.name}.{self._submission.token}.{slot.round}"
        flags = [*options.flags(self._spec, post, state.endpoint, run_id), *options.target(self._spec)]
        variables = dict(options.environment(self._spec, post))
        self._actors[claim].order.remote(slot.launch, flags, variables, self._spec.working_dir or None, stop)

    def _name(self, claim: object) -> str:
        return claim_name(self._spec.name, self._submission.token, claim)


def _group(group_id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID.from_hex(group_id))


def said_of(error: RayError) -> str:
    """Return in a line why an actor gives no answer."""
    if isinstance(error, RayTaskError):
        return f"it can't answer: {error.cause!r}"[:_LONGEST]
    lines = str(error).strip().splitlines() or ["it died"]
    if isinstance(error, RayActorError):
        return lines[0]
    return f"{type(error).__name__}: {' '.join(dict.fromkeys((lines[0], lines[-1])))}"[:_LONGEST]


def _stands(actor: Any) -> str:
    """Return how Ray holds an actor: ALIVE, DEAD, RESTARTING, …; it forgets the dead by and by."""
    return str(ray._private.state.actors(actor._actor_id.hex()).get("State", DEAD))
