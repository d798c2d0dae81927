"""Pods that start together or not at all.

    from resilience.integrations.kubernetes import podgroups

    group = podgroups.PodGroup("dance", min_member=2, priority=50)
    t9k = podgroups.scheduler("t9k")
    t9k.resource(group)                          # the custom resource, to be created first
    t9k.marks(group).onto(pod)                   # a Pod of the group: labels and schedulerName
    podgroups.wish(job)                          # the group that a job asks for, or None

    podgroups.apply.ensure(api, group, t9k)      # has it in a cluster

Everything here but ``apply`` is pure: nothing talks to a cluster. :mod:`.apply` and :mod:`.part` do.
"""

from resilience.integrations.kubernetes.podgroups import apply
from resilience.integrations.kubernetes.podgroups.group import GroupIsFixed, Owner, PodGroup, PodGroupError, Role
from resilience.integrations.kubernetes.podgroups.jobs import Wish, wish
from resilience.integrations.kubernetes.podgroups.schedulers import GangScheduler, Marks, scheduler

__all__ = [
    "GangScheduler",
    "GroupIsFixed",
    "Marks",
    "Owner",
    "PodGroup",
    "PodGroupError",
    "Role",
    "Wish",
    "apply",
    "scheduler",
    "wish",
]
