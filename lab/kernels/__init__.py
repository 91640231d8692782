"""Kernels in Triton, for GPUs. Each has its plain twin elsewhere in `model`, which is its specification."""
