"""The variants of RMSNorm (:func:`compilepass.kernels.native.rms_norm`), one rule each.

In float32 nothing is rounded on the way, so there ``"torch"`` computes what ``"llama"`` does.
"""

from __future__ import annotations

import torch

__all__ = ["VARIANTS"]

#: variant and the dtypes in which it differs from those before it
VARIANTS = {
    "llama": (torch.float32, torch.bfloat16, torch.float16),
    "torch": (torch.bfloat16, torch.float16),
    "gemma": (torch.float32, torch.bfloat16, torch.float16),
}
