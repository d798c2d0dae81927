"""A complete training job for Kubernetes, made from a few values."""
