from __future__ import annotations

import pytest

from resilience.errors import ConfigError
from resilience.groups.topology import NOWHERE, Place, from_labels, from_slurm, given


def test_labels_of_a_pod_say_its_group_its_rack_and_how_many_groups_there_are() -> None:
    labels = {
        "scheduling/rack-group": "3",
        "scheduling/rack-id": "xxx.xx",
        "scheduling/rack-group-size": "4",
        "app": "x",
    }
    assert from_labels(labels) == Place("xxx.xx", 3, 4)


def test_pod_without_labels_is_in_no_group() -> None:
    assert from_labels({"app": "x"}) == NOWHERE
    assert not NOWHERE.known
    assert not from_labels({"scheduling/rack-group": "", "scheduling/rack-id": ""}).known


def test_group_is_told_by_its_index_which_stays_when_it_moves() -> None:
    before, after = (from_labels({"scheduling/rack-group": "1", "scheduling/rack-id": rack}) for rack in ("a", "b"))
    assert before.key == after.key == "1"
    assert from_labels({"scheduling/rack-id": "a"}).key == "a"


@pytest.mark.parametrize("text", ["one", "-1", "1.5", "²", "9" * 12])
def test_index_that_is_no_number_raises_and_names_the_label(text: str) -> None:
    with pytest.raises(ConfigError, match="scheduling/rack-group"):
        from_labels({"scheduling/rack-group": text})


def test_index_beyond_the_number_of_groups_raises() -> None:
    with pytest.raises(ConfigError, match="group 4 of 4"):
        from_labels({"scheduling/rack-group": "4", "scheduling/rack-group-size": "4"})
    with pytest.raises(ConfigError, match="0 groups"):
        from_labels({"scheduling/rack-group": "0", "scheduling/rack-group-size": "0"})


def test_settings_say_it_where_there_are_no_labels() -> None:
    assert given("rack-a", 2) == Place("rack-a", 2)
    assert given(None, None) == NOWHERE
    with pytest.raises(ConfigError, match="counted from 0"):
        given(None, -1)


@pytest.mark.parametrize(
    ("way", "words", "group"),
    [
        ("top.left.n1", "switch.switch.node", "left"),
        ("left.n1", "switch.node", "left"),
        ("top.left.n1.cluster.example", "switch.switch.node", "left"),  # a node's name may have dots
        ("top.s[1-2].n1", "switch.switch.node", "s[1-2]"),
        ("block3.n1", "block.node", "block3"),
        ("n1", "node", ""),
        ("", "", ""),
        ("n1", "switch.switch.node", ""),  # half a way leads nowhere
    ],
)
def test_node_below_a_switch_of_slurms_is_in_its_group(way: str, words: str, group: str) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": way, "SLURM_TOPOLOGY_ADDR_PATTERN": words}
    assert from_slurm(environ) == Place(group)


def test_job_that_is_not_slurms_is_in_no_group() -> None:
    assert from_slurm({}) == NOWHERE
