"""Fails in every cycle."""

import resilience

resilience.heartbeat(0)
raise RuntimeError("no good")
