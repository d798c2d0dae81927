"""Time a guard's calls in a real loop under DDP over gloo, from inside rank 0."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience
from benchmarks.workloads.voice import say

_STEPS, _ROLLBACKS, _WARM = 2_000, 20, 100


def measured(ns: list[int]) -> tuple[float, float]:
    """Return median and 99th percentile in µs."""
    ordered = sorted(ns)
    return statistics.median(ordered) / 1e3, ordered[len(ordered) * 99 // 100] / 1e3


def main() -> None:
    """Train, and tell what the parts took."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, 64)
    told: dict[str, tuple[float, float]] = {}
    for lagged in (False, True):
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        checkpoint = resilience.FlashCheckpoint(folder[0], model=model, optimizer=optimizer, memory_every=500)
        guard = resilience.Guard(checkpoint, lagged=lagged)
        steps, calls = [], []
        for step, _ in guard.steps(itertools.count, checkpoint.restore(allow_fresh_start=True), _WARM + _STEPS):
            begin = perf_counter_ns()
            loss = (model(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            middle = perf_counter_ns()
            bad = guard.bad(loss, norm)
            end = perf_counter_ns()
            assert not bad
            optimizer.step()
            steps.append(perf_counter_ns() - begin - (end - middle))
            calls.append(end - middle)
            checkpoint.save(step)
        told["guard.bad, lagged" if lagged else "guard.bad"] = measured(calls[_WARM:])
        if not lagged:
            told["step"] = measured(steps[_WARM:])
            told["rollback"] = measured([rolled_back(checkpoint) for _ in range(_ROLLBACKS)])
        checkpoint.close()
    if dist.get_rank() == 0:
        say("measured", **told)
    dist.destroy_process_group()


def rolled_back(checkpoint: resilience.FlashCheckpoint) -> int:
    """Return how many ns a rollback to the newest snapshot took."""
    begin = perf_counter_ns()
    checkpoint.rollback()
    return perf_counter_ns() - begin


if __name__ == "__main__":
    main()
