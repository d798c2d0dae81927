"""Adapters to other frameworks and engines, installed as ``resilience.integrations``. Each needs its own extra."""
