"""``RankMonitorClient``: the same machinery under the names that users of ``ft_launcher`` know.

    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_heartbeat() / client.start_section("step") / client.end_section("step")
    client.calculate_and_set_hb_timeouts()
    client.shutdown_workload_monitoring()

What differs: nothing here needs ``torch.distributed`` (the launchers merge over ranks, without a collective), nothing can
block a training step, and misuse raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.errors import RankMonitorClientError
from resilience.pulse import attach, client, control
from resilience.pulse.timeouts import HEARTBEAT, INITIAL, OUTSIDE, SECTION


@dataclass(frozen=True)
class HeartbeatTimeouts:
    """Seconds; ``None`` while it is learned and not known yet, ``math.inf`` for no timeout."""

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool = False


@dataclass(frozen=True)
class SectionTimeouts:
    """Seconds by section, and between sections."""

    section: Mapping[str, float] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: frozenset[str] = frozenset()
    is_out_of_section_calculated: bool = False


class RankMonitorClient:
    """A rank's handle on its monitor. Make one per process; it can be initialised again after a shutdown."""

    def __init__(self) -> None:
        self._ready = False
        self._calculated: dict[str, float] = {}

    def init_workload_monitoring(self) -> None:
        """Start to be watched. Without a launcher every call is a no-op."""
        if self._ready:
            raise RankMonitorClientError(
                "init_workload_monitoring() was called twice. Call shutdown_workload_monitoring() first."
            )
        self._ready = True
        client.resume()
        if self._calculated:
            self._send_calculated()

    def shutdown_workload_monitoring(self) -> None:
        """Say that no more heartbeats and sections will come."""
        self._check()
        client.end_all_sections()
        client.done()
        self._ready = False

    def send_workload_control_request(self, request: control.WorkloadControlRequest) -> None:
        """Tell the launchers what to do with the job; they act at once."""
        self._check()
        control.send(request)

    def send_heartbeat(self) -> None:
        """Say that this rank is alive."""
        self._check()
        client.heartbeat()

    def start_section(self, name: str) -> None:
        """Open a section."""
        self._check()
        client.section(name).enter()

    def end_section(self, name: str) -> None:
        """Close a section that is open in this thread."""
        self._check()
        if not client.section(name).leave():
            raise RankMonitorClientError(f"end_section({name!r}): that section is not open in this thread.")

    def end_all_sections(self) -> None:
        """Close every open section, nested ones included."""
        self._check()
        client.end_all_sections()

    @property
    def hb_timeouts(self) -> HeartbeatTimeouts:
        """The heartbeat timeouts in force."""
        limits = self._limits()
        return HeartbeatTimeouts(limits.get(INITIAL), limits.get(HEARTBEAT), HEARTBEAT in self._calculated)

    @property
    def section_timeouts(self) -> SectionTimeouts:
        """The section timeouts in force."""
        limits = self._limits()
        return SectionTimeouts(
            {name[len(SECTION) :]: value for name, value in limits.items() if name.startswith(SECTION)},
            limits.get(OUTSIDE),
            frozenset(name[len(SECTION) :] for name in self._calculated if name.startswith(SECTION)),
            OUTSIDE in self._calculated,
        )

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Set the heartbeat timeouts to ``safety_factor`` × the largest seen by any rank, with the floor applied."""
        self._check()
        return self._calculate([INITIAL, HEARTBEAT], skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Iterable[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Do the same for the sections (all that were seen, or the selected ones) and the time between them."""
        self._check()
        if selected_sections is None:
            wanted = [name for name in self._suggested() or {} if name.startswith(SECTION)]
        else:
            wanted = [SECTION + name for name in selected_sections]
        return self._calculate(wanted + [OUTSIDE] * calc_out_of_section, skip_if_not_ready)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned and calculated, as plain values, to be saved with a checkpoint."""
        answer = attach.ask({"op": "timeouts"}) or {}
        return {"version": 1, "calculated": dict(self._calculated), "learned": answer.get("learned", {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up again what :meth:`state_dict` returned. Merged with what is known, so a stale state does no harm."""
        if state.get("version") != 1:
            raise RankMonitorClientError(f"load_state_dict: not a state of this version ({state.get('version')!r}).")
        self._calculated = {str(name): float(value) for name, value in state["calculated"].items()}
        attach.ask({"op": "load", "learned": state["learned"]})
        if self._ready and self._calculated:
            self._send_calculated()

    def _calculate(self, wanted: list[str], skip_if_not_ready: bool) -> bool:
        suggested = self._suggested()
        if suggested is None:
            return False  # no launcher: nothing is watched, so there is nothing to set
        missing = [name for name in wanted if name not in suggested and name != INITIAL]
        if missing or not wanted:
            if skip_if_not_ready:
                return False
            names = ", ".join(missing) or "any section"
            raise RankMonitorClientError(
                f"not enough was seen to calculate the timeouts of {names}. Timeouts were left as they are; call this "
                "later, or with skip_if_not_ready=True."
            )
        for name in wanted:
            fresh = suggested.get(name)
            if fresh is not None:
                earlier = self._calculated.get(name)
                self._calculated[name] = fresh if earlier is None else (earlier + fresh) / 2
        self._send_calculated()
        return True

    def _suggested(self) -> dict[str, float] | None:
        answer = attach.ask({"op": "timeouts"})
        return dict(answer["calculated"]) if answer else None

    def _limits(self) -> dict[str, float]:
        answer = attach.ask({"op": "timeouts"})
        limits = (
            {name: float("inf") if value is None else value for name, value in answer["limits"].items()}
            if answer
            else {}
        )
        return {**limits, **self._calculated}

    def _send_calculated(self) -> None:
        attach.ask({"op": "calculated", "limits": self._calculated})

    def _check(self) -> None:
        if not self._ready:
            raise RankMonitorClientError("RankMonitorClient is not initialised: call init_workload_monitoring() first.")
