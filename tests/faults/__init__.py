"""Tests that kill, stop, hang, fill and corrupt."""
