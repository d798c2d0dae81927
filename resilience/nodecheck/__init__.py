"""Who is fit to train: a check of every node before the workers start, for any accelerator."""
