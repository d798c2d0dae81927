"""Exit codes of ``resilience run``: what a scheduler can act on.

Codes of 75 and above are ours; workers' own hardware codes (14, 128, 201, 202) pass through when their node leaves.
"""

from __future__ import annotations

FINISHED = 0  # all workers ended with 0
FAILED = 1  # a worker failed and no restart is left (or none was allowed), as with torchrun
USAGE = 2  # nothing was started: a flag or a setting can't be meant
CUT_OFF = 75  # this node lost its job: the store or the other nodes are out of reach; the same command may work later
NODE_LEFT = 76  # this node was taken out of the job, which goes on: replace the node
ABORTED = 77  # restarting can't help; the same code on every node
SHUT_DOWN = 78  # a worker asked for it (ShutdownWorkload); the same code on every node
PREEMPTED = 79  # asked to stop by SIGTERM or SIGUSR1, and did: requeue the job
UNFIT = 80  # this node failed its check and never trained; the job goes on without it: repair or replace the node

MEANINGS = {
    FAILED: "failed, or ended by a signal",
    USAGE: "nothing was started: a flag or a setting can't be meant",
    CUT_OFF: "this node lost its job; try again",
    NODE_LEFT: "this node left the job; replace it",
    ABORTED: "restarting can't help",
    SHUT_DOWN: "shut down on request",
    PREEMPTED: "asked to stop; start it again to go on",
    UNFIT: "this node failed its check; repair or replace it",
}
