"""What a device is asked to do: a GEMM whose product is verified, and an all-gather whose contents are.

Matrices hold -1, 0 and 1 in a pattern that every process can make again, so all sums are small whole numbers, exact in every type
that is used. A product is verified on the host against ``left (right x)`` for whole-numbered vectors ``x`` (Freivalds' way): one
wrong element is seen but for one time in thousands per vector, at the cost of a few matrix-vector products, and never by asking
the device under test. The last product of each burst is compared with the first one on the device, bit by bit.

Rule: what is timed is the best of several, after one that warms up. A neighbour's load only ever adds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience.nodecheck.accelerators import Accelerator

_REPEATS = 5
_VECTORS = 3
_RANGE = 1000
_SEED = 20_240_229


class WrongResult(Exception):  # noqa: N818 - reads as what it is
    """The device computed, or the network delivered, something else than what is right."""


@dataclass(frozen=True)
class Figures:
    """What a task took, of GEMMs a whole burst. ``rate``: GFLOP/s of a GEMM, MB/s of an all-gather."""

    seconds: float
    rate: float


def gemm(accelerator: Accelerator, device: Any) -> Figures:
    """Multiply matrices on the device, verify the product, return the best time; raise :class:`WrongResult`."""
    import torch  # noqa: PLC0415

    size = accelerator.size
    source = torch.Generator().manual_seed(_SEED)
    dtype = getattr(torch, accelerator.dtype)
    left, right = (torch.randint(-1, 2, (size, size), generator=source, dtype=torch.int8) for _ in range(2))
    here, there = left.to(device).to(dtype), right.to(device).to(dtype)
    product = accelerator.multiply(here, there)
    accelerator.synchronize()
    _verify(left, right, product, source)
    best = float("inf")
    for number in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(accelerator.burst):
            again = accelerator.multiply(here, there)
        accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
        if not torch.equal(again, product):
            wrong = int((again != product).sum())
            raise WrongResult(f"repetition {number + 1} of the same GEMM differs in {wrong} of {size * size} elements")
    return Figures(best, accelerator.burst * 2.0 * size**3 / best / 1e9)


def _verify(left: Any, right: Any, product: Any, source: Any) -> None:
    import torch  # noqa: PLC0415

    shape = (left.shape[0], _VECTORS)
    vectors = torch.randint(-_RANGE, _RANGE + 1, shape, generator=source, dtype=torch.int32).to(torch.float64)
    found = product.to("cpu").to(torch.float64)
    if not bool(torch.isfinite(found).all()):
        raise WrongResult("the product of the GEMM has elements that are no numbers")
    wanted = left.to(torch.float64) @ (right.to(torch.float64) @ vectors)
    wrong = int(((found @ vectors) != wanted).any(dim=1).sum())
    if wrong:
        raise WrongResult(f"the product of the GEMM is wrong in {wrong} of {left.shape[0]} rows")


def gather(accelerator: Accelerator, device: Any, *, store: Any, rank: int, world: int, timeout: float) -> Figures:
    """Gather a known pattern from every device of the group, verify what came, return the best time."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    options = {"device_id": device} if accelerator.backend == "nccl" else {}
    dist.init_process_group(
        accelerator.backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout), **options
    )
    length = accelerator.gather_mib * (1 << 20) // 4
    mine = _pattern(rank, length).to(device)
    came = [torch.empty_like(mine) for _ in range(world)]
    best = float("inf")
    for number in range(_REPEATS + 1):
        for part in came:
            part.fill_(-1)
        accelerator.synchronize()
        start = time.perf_counter()
        dist.all_gather(came, mine)
        accelerator.synchronize()
        if number:
            best = min(best, time.perf_counter() - start)
        for peer in range(world):
            if not torch.equal(came[peer].to("cpu"), _pattern(peer, length)):
                raise WrongResult(f"what came from device {peer} of the group is not what it sent")
    return Figures(best, 4.0 * length * world / best / 1e6)


def _pattern(rank: int, length: int) -> Any:
    import torch  # noqa: PLC0415

    return torch.arange(length, dtype=torch.int32) * 7 + rank * 1_000_003
