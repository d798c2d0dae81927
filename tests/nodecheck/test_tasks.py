"""The tasks: a right result is right, a wrong one is seen, however small the mistake."""

from __future__ import annotations

from typing import Any

import pytest

from resilience.nodecheck import tasks
from resilience.nodecheck.accelerators import Cpu

torch = pytest.importorskip("torch")


class Small(Cpu):
    size = 64


class Off(Small):
    """Wrong in one element, by ``amount``, in the call ``when``."""

    def __init__(self, amount: float, when: int) -> None:
        self.amount, self.when, self.calls = amount, when, 0

    def multiply(self, left: Any, right: Any) -> Any:
        self.calls += 1
        product = left @ right
        if self.calls >= self.when:
            product[17, 42] += self.amount
        return product


def test_products_of_a_burst_are_timed_together() -> None:
    class Burst(Off):
        burst = 7

    counting = Burst(amount=0.0, when=0)
    assert tasks.gemm(counting, torch.device("cpu")).seconds > 0
    assert counting.calls == 1 + 5 * 7


def test_right_product_passes_with_figures() -> None:
    figures = tasks.gemm(Small(), torch.device("cpu"))
    assert figures.seconds > 0
    assert figures.rate > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_small_whole_numbers_are_exact_in_every_type_that_is_used(dtype: str) -> None:
    small = Small()
    small.dtype = dtype
    tasks.gemm(small, torch.device("cpu"))


@pytest.mark.parametrize("amount", [1.0, -1.0, 1e-3, float("nan"), float("inf")])
def test_one_wrong_element_is_seen(amount: float) -> None:
    with pytest.raises(tasks.WrongResult):
        tasks.gemm(Off(amount, when=1), torch.device("cpu"))


def test_element_that_is_wrong_only_once_is_seen() -> None:
    with pytest.raises(tasks.WrongResult, match="repetition 2 of the same GEMM differs in 1 of 4096"):
        tasks.gemm(Off(1.0, when=3), torch.device("cpu"))


def test_gather_of_one_verifies_its_own_contents() -> None:
    from torch.distributed import HashStore, destroy_process_group

    figures = tasks.gather(Small(), torch.device("cpu"), store=HashStore(), rank=0, world=1, timeout=30)
    destroy_process_group()
    assert figures.seconds > 0


def test_what_arrives_as_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that changes what it carries can't be had here: the collective is replaced by one that does."""
    from torch.distributed import HashStore, destroy_process_group

    real = torch.distributed.all_gather

    def all_gather(came: list[Any], mine: Any) -> None:
        real(came, mine)
        came[0][-1] += 1

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    try:
        with pytest.raises(tasks.WrongResult, match="what came from device 0"):
            tasks.gather(Small(), torch.device("cpu"), store=HashStore(), rank=0, world=1, timeout=30)
    finally:
        destroy_process_group()
