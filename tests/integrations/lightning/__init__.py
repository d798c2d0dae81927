"""The adapter to Lightning."""
