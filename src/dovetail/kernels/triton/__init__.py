"""Kernels in Triton for NVIDIA GPUs, developed on an H200; see ``kernels.backend``.

Nothing imports this package but ``kernels.registry``, when it is asked for: machines without a GPU
have no Triton.
"""
