"""Who starts again: the launcher, a superset of torchrun on torch.distributed.elastic."""
