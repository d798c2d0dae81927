"""The registry: names, other projects' names for the same, classes of one's own, and what typos say."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.errors import ConfigError
from resilience.nodecheck import accelerators
from resilience.nodecheck.accelerators import Accelerator, Ascend, Cpu, Nvidia, check_name, load, register


@pytest.mark.parametrize("name", ["nvidia", "NVIDIA", "nvidia.com/gpu", "nvidia-gpu", "nvidia_gpu", "cuda", "gpu"])
def test_all_spellings_of_nvidia_are_one(name: str) -> None:
    assert type(load(name)) is Nvidia


@pytest.mark.parametrize("name", ["ascend", "ascend-npu", "ascend_npu", "npu"])
def test_ascend_is_known_and_needs_its_package(name: str) -> None:
    check_name(name)
    with pytest.raises(ModuleNotFoundError, match="torch_npu"):
        load(name)
    assert (Ascend.type, Ascend.backend) == ("npu", "hccl")


def test_without_an_accelerator_auto_is_the_hosts_processors() -> None:
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        pytest.skip("this host has one: left out is what is found where there is none")
    assert type(load("auto")) is Cpu


def test_typo_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'nvidia'"):
        check_name("nvida")
    with pytest.raises(ConfigError, match="module::Class"):
        check_name("::")


def test_decorator_registers_a_class_and_its_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "_REGISTERED", dict(accelerators._REGISTERED))

    @register("xpu")
    class Xpu(Accelerator):
        type = "xpu"
        backend = "xccl"

    check_name("xpu")
    assert type(load("xpu")) is Xpu
    assert load("xpu").name == "xpu"


def test_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "xxxx_check-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xxxx-check\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{accelerators.GROUP}]\nyyyy = tests.nodecheck.patients:Patient\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_name("yyyy")
    assert type(load("yyyy")).__name__ == "Patient"


def test_new_processor_needs_two_lines_where_torch_knows_its_devices() -> None:
    class Meta(Accelerator):
        type = "cpu"
        backend = "gloo"

    assert Meta().count() == 1
    assert Meta().describe(0) == "cpu:0"
    Meta().synchronize()


def test_matrices_without_a_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="its size is 0; a whole number from 1 up"):
        load("tests.nodecheck.patients::NoSize")
