"""Slurm: a batch script to start from, a chain of requeues that ends when it should, and faulty nodes out of scheduling."""
