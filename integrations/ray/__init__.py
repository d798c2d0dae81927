"""Ray: one launcher on each of a job's Ray nodes, and a supervisor that finds nodes for them.

    from resilience.integrations.ray import JobBuilder

    job = JobBuilder().nodes(4).nproc_per_node(8).train("train.py").workload("llm").build()
    job.submit()
    job.wait()

Rule: whoever only describes a job, and every rank, needs no Ray: it is imported when a job is submitted or attached to.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DLJobBuilder": "builder",
    "Job": "job",
    "JobBuilder": "builder",
    "JobSpec": "spec",
    "JobStatus": "status",
    "RayJobError": "status",
    "attach": "job",
    "job_config": "call",
}

__all__ = ["DLJobBuilder", "Job", "JobBuilder", "JobSpec", "JobStatus", "RayJobError", "attach", "job_config"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
