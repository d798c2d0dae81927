"""From a job's spec to the command of one launcher: pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from resilience.integrations.ray.spec import JobSpec, shown

from resilience.config import ENV_JOB_CONFIG

_NAME_LENGTH = 16  # of a Ray node's id; enough to tell nodes apart, and to be read


@dataclass(frozen=True)
class Post:
    """Where one launcher stands: its place among the job's nodes, its Ray node, and its group if there are any."""

    rank: int
    node: str
    address: str
    group: int | None = None
    rack: str = ""


def flags(spec: JobSpec, post: Post, endpoint: str, run_id: str) -> list[str]:
    """Return what ``resilience run`` is told on this node."""
    conf = {"is_host": "false", **{name: shown(value) for name, value in spec.rendezvous.items()}}
    words = [
        f"--nnodes={spec.min_nodes}:{spec.nodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        f"--max-restarts={spec.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf={','.join(f'{name}={value}' for name, value in conf.items())}",
        f"--local-addr={post.address}",
        f"--role={spec.workload}",
        f"--ft-node-name={post.node[:_NAME_LENGTH]}",
    ]
    if post.group is not None:
        words += [f"--ft-node-group={post.rack}", f"--ft-node-group-index={post.group}"]
    if spec.run_dir:
        words.append(f"--ft-run-dir={spec.run_dir}/node-{post.rank}")
    words += [f"--ft-{name.replace('_', '-')}={shown(value)}" for name, value in spec.settings.items()]
    return [*words, *spec.launcher_args]


def target(spec: JobSpec) -> list[str]:
    """Return what the ranks run."""
    if spec.script:
        return [spec.script, *map(str, spec.args)]
    return ["--module", "resilience.integrations.ray.call"]


def environment(spec: JobSpec, post: Post) -> Mapping[str, str]:
    """Return what is added to the environment of a launcher. ``GROUP_RANK`` is the order of nodes, whoever comes first."""
    told = {"config": dict(spec.config), "function": spec.function, "args": list(spec.args)}
    return {**spec.environment, "GROUP_RANK": str(post.rank), ENV_JOB_CONFIG: json.dumps(told)}
