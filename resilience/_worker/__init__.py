"""The trampoline: what must be in place before a worker's first import."""
