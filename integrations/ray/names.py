"""What a job's actors and placement groups are called. What has such a name and is not wanted is removed: it is nobody else's."""

from __future__ import annotations

import re

_CLAIM = re.compile(r"[0-9a-f]+/(\d+|store-\d+)")


def claim_name(job: str, token: str, claim: object) -> str:
    """Return what a claim is called: by job, submission and number; what an earlier submission left has another name."""
    return f"{_prefix(job)}{token}/{claim}"


def is_claim_of(job: str, name: str) -> bool:
    """Return whether a name is that of a claim of any submission of the job."""
    return name.startswith(_prefix(job)) and _CLAIM.fullmatch(name.removeprefix(_prefix(job))) is not None


def _prefix(job: str) -> str:
    return f"resilience/{job}/"
