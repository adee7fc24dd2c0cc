"""Triton compiles for a GPU where there is one; elsewhere its interpreter runs the same kernels.

A plugin and not a fixture: the variable is read when a kernel is defined, so it must be there
before the first test module is imported, whichever that is.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
