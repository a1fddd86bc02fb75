"""The way from a checked call to its kernels: problems, plans, ops, autograd nodes."""
