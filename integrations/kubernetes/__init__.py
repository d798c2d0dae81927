"""Kubernetes: faulty nodes out of scheduling, node groups that move together, gang scheduling, and a job to start from."""
