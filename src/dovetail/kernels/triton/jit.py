"""Triton's decorator under a type that launches fit: what it declares knows no launch options."""

from typing import Any

import triton

jit: Any = triton.jit
