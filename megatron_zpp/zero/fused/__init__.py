"""Triton kernels of the optimizer, for GPUs."""
