"""Checks of the host: what would end training soon is a fault, what may be meant is a warning, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilience.nodecheck import host

GIB = 1 << 30


def a_host(folder: Path, *, free_kib: int = 8 << 20, total_kib: int = 16 << 20, **cgroup: int | str) -> host.Findings:
    """Look at a host with so much memory, and a control group with such files."""
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "self" / "mountinfo").write_text(f"31 23 0:28 / {groups} rw - cgroup2 cgroup2 rw\n")
    (proc / "meminfo").write_text(
        f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {free_kib} kB\nHugePages: 0\n"
    )
    for name, value in cgroup.items():
        (groups / name.replace("__", ".")).write_text(f"{value}\n")
    (folder / "run").mkdir()
    return host.look(str(folder / "run"), proc=proc)


def test_this_host_is_fine_and_nothing_is_left(tmp_path: Path) -> None:
    found = host.look(str(tmp_path))
    assert found.faults == []
    assert found.figures["disk_free_mib"] > 0
    assert not list(tmp_path.iterdir())


def test_folder_that_can_not_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = host.look(str(tmp_path / "file" / "nowhere"))
    assert "can't be written: Not a directory" in found.faults[0]


def test_folder_that_is_yet_to_be_made_is_looked_at_where_it_would_be(tmp_path: Path) -> None:
    found = host.look(str(tmp_path / "new" / "run"))
    assert found.faults == []
    assert found.figures["disk_free_mib"] > 0
    assert not list(tmp_path.iterdir())


def test_full_disk_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *tuple(real)[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    found = host.look(str(tmp_path))
    assert "has 0 MiB left" in found.faults[0]


def test_no_memory_is_a_fault_and_little_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert "MiB of memory are left" in a_host(tmp_path / "a", free_kib=100 << 10).faults[0]
    little = a_host(tmp_path / "b", free_kib=500 << 10)
    assert little.faults == []
    assert "500 of 16384 MiB of memory are left" in little.warnings[0]


def test_limit_of_the_control_group_counts_and_its_cached_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tight = a_host(tmp_path / "a", memory__max=4 * GIB, memory__current=4 * GIB, memory__stat="anon 1\nfile 2")
    assert "0 MiB of memory are left" in tight.faults[0]
    stat = f"inactive_file {2 * GIB}\nactive_file {GIB}"
    cached = a_host(tmp_path / "b", memory__max=4 * GIB, memory__current=4 * GIB, memory__stat=stat)
    assert cached.faults == []
    assert cached.figures["memory_free_mib"] == 3 * 1024


def test_host_without_dev_shm_is_warned_about(tmp_path: Path) -> None:
    found = host.look(str(tmp_path), shm=str(tmp_path / "nowhere"))
    assert found.faults == []
    assert "data loaders" in found.warnings[0]
