"""Fails in every cycle, each time in another way."""

import os

import resilience

cycle = int(os.environ["RESILIENCE_CYCLE"])
resilience.heartbeat(0)
raise (RuntimeError, ValueError, KeyError)[cycle]("no good")
