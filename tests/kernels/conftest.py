"""Triton compiles for a GPU where there is one; elsewhere its interpreter runs the same kernels."""

import os
import platform

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

# Where the test extra does not bring Triton. Everywhere else its absence is an error, not a skip.
collect_ignore_glob = (
    [] if (platform.system(), platform.machine()) == ("Linux", "x86_64") else ["test_triton_*.py"]
)
