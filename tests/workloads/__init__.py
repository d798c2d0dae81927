"""Scripts that the tests start."""
