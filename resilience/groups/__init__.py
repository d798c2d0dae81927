"""Nodes that belong together: who is in which group, and when a whole group moves."""
