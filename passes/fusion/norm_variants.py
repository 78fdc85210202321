"""The variants of RMSNorm (:func:`compilepass.kernels.native.rms_norm`), one rule each.

In float32 nothing is rounded on the way, so there ``"torch"`` computes what ``"llama"`` does. The
order matters: in float32 ``"llama"`` is a part of both others, with a weight that they compute.
"""

from __future__ import annotations

import torch

__all__ = ["VARIANTS"]

#: variant and the dtypes in which it differs from the others
VARIANTS = {
    "gemma": (torch.float32, torch.bfloat16, torch.float16),
    "torch": (torch.bfloat16, torch.float16),
    "llama": (torch.float32, torch.bfloat16, torch.float16),
}
