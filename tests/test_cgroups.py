"""Which control groups limit a process's memory: its own and all above, wherever they are mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience import cgroups
from resilience.cgroups import Limit, folders, limits

V1 = "4:memory:{}\n3:cpuset:/\n1:name=systemd:/\n0::/\n"
MOUNTS_V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
MOUNTS_V2 = "30 23 0:26 {} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def below(*paths: str, root: str = "/sys/fs/cgroup") -> list[Path]:
    return [Path(root, path) for path in paths]


def test_group_of_slurm_or_systemd_is_found_with_all_above_it() -> None:
    job = folders("0::/system.slice/slurmstepd.scope/job_7/step_0\n", MOUNTS_V2.format("/"))
    assert job == below(
        *("system.slice/slurmstepd.scope/job_7/step_0", "system.slice/slurmstepd.scope/job_7"),
        *("system.slice/slurmstepd.scope", "system.slice", ""),
    )
    old = folders(V1.format("/slurm/uid_0/job_7"), MOUNTS_V1.format("/"))
    # Then that of version 2, which counts no memory here: it has no such files.
    assert old[:4] == below(*("slurm/uid_0/job_7", "slurm/uid_0", "slurm", ""), root="/sys/fs/cgroup/memory")


def test_container_that_sees_its_own_group_as_the_root_is_understood_and_a_group_below_it_too() -> None:
    mounts = MOUNTS_V1.format("/docker/abc")
    memory = "/sys/fs/cgroup/memory"
    assert folders(V1.format("/docker/abc"), mounts)[:-1] == below("", root=memory)
    assert folders(V1.format("/docker/abc/inner"), mounts)[:-1] == below("inner", "", root=memory)


@pytest.mark.parametrize(
    ("path", "root"), [("/", "/"), ("/elsewhere", "/docker/abc"), ("/../sibling", "/"), ("/docker/ab", "/docker/abc")]
)
def test_group_that_is_not_mounted_leaves_the_mounted_ones(path: str, root: str) -> None:
    assert folders(f"0::{path}\n", MOUNTS_V2.format(root)) == below("")


@pytest.mark.parametrize(("cgroup", "mounts"), [("", ""), ("nonsense", "nonsense"), ("0::/a\n", ""), ("", MOUNTS_V2)])
def test_what_can_not_be_read_is_no_limit(cgroup: str, mounts: str) -> None:
    assert folders(cgroup, mounts) == []


def test_limit_counts_on_every_level_and_the_largest_number_means_none(tmp_path: Path) -> None:
    groups, proc = tmp_path / "a folder", tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (groups / "job" / "step").mkdir(parents=True)
    (proc / "cgroup").write_text("5:cpu,memory:/job/step\n")
    mount = str(groups).replace(" ", "\\040")
    (proc / "mountinfo").write_text(f"35 31 0:32 / {mount} rw - cgroup cgroup rw,memory\n")
    for folder, limit in (("", 9223372036854771712), ("job", 1000), ("job/step", 600)):
        (groups / folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (groups / folder / "memory.usage_in_bytes").write_text("500\n")
        stat = "cache 1\ninactive_file 1\nactive_file 1\ntotal_inactive_file 30\ntotal_active_file 7\n"
        (groups / folder / "memory.stat").write_text(stat)
    assert limits(tmp_path / "proc") == [Limit(600, 500, 30, 7), Limit(1000, 500, 30, 7)]


def test_this_process_can_be_asked() -> None:
    assert all(it.limit > 0 and it.used >= 0 for it in cgroups.limits())
