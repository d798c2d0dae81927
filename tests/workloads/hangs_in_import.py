"""Rank 1 hangs in an import, before it can call us."""

import slow_module  # type: ignore[import-not-found]  # noqa: F401

import resilience

resilience.heartbeat(0)
