"""``resilience kubernetes …``: what there is, and who does it. A command is loaded when it is called: most need no cluster."""

from __future__ import annotations

import importlib
import sys

from resilience.errors import nearest

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
    word = argv[0] if argv else "--help"
    if word in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if word not in COMMANDS:
        sys.stderr.write(f"resilience kubernetes: unknown command {word!r}.{nearest(word, COMMANDS)}\n{_USAGE}")
        return 2
    module, _, name = COMMANDS[word].partition(":")
    return int(getattr(importlib.import_module(module), name)(argv[1:]))
