"""Rotary position embedding in plain torch (Su et al., arXiv 2104.09864).

Shape legend: T tokens, G heads, D head dim.
"""

from torch import Tensor


def rotary(qk_TGD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """See ``kernels.api.rotary``."""
    # The signs are in the sines, so swapping the halves is all that is left to do.
    swapped_TGD = qk_TGD.roll(qk_TGD.shape[2] // 2, dims=-1)
    return (qk_TGD * cos_T1D).addcmul_(swapped_TGD, sin_T1D).to(qk_TGD.dtype)
