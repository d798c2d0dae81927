"""``resilience kubernetes …``: what there is, and who does it. A command is loaded when it is called: most need no cluster."""

from __future__ import annotations

from resilience.command import dispatch

_USAGE = """\
usage: resilience kubernetes job render [--values FILE] [options]
       resilience kubernetes podgroup render|apply|join|crd [options]
       resilience kubernetes controller [options]
       resilience kubernetes manifests [options]
       resilience kubernetes uncordon NODE …

  job         print a complete training job, Service and Job, ready for `kubectl apply -f -`
  podgroup    groups of Pods that start together: print one, apply one, have Pods join it
  controller  watch the cluster, and do for training jobs what they may not do themselves
  manifests   print the controller's Deployment, account and roles
  uncordon    put nodes back in service that were marked as faulty
"""

# name: module:function, called with the words behind the name; returns the exit code
COMMANDS = {
    "controller": "resilience.integrations.kubernetes.controller:main",
    "job": "resilience.integrations.kubernetes.job.cli:main",
    "manifests": "resilience.integrations.kubernetes.manifests:main",
    "podgroup": "resilience.integrations.kubernetes.podgroups.cli:main",
    "uncordon": "resilience.integrations.kubernetes.faulty:uncordon",
}


def main(argv: list[str]) -> int:
    """Run a command; return the exit code."""
    return dispatch("resilience kubernetes", _USAGE, COMMANDS, argv)
