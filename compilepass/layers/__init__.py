"""The custom ops and layers that ship, each with a native forward and the toolkit's own kernels.

Every op takes the options of ``CustomOp`` (``enforce_enable``, ``compile_native``) as keywords.
Enabled, it calls its op in ``torch.ops.compilepass``, which finds the best kernel for the device
and runs native where there is none; disabled, it runs the same mathematics as plain PyTorch code.

    with use_config(CompilationConfig(custom_ops=["none", "+rms_norm"])):
        norm = RMSNorm(4096)
    normed, total = norm(x, residual)
"""

from .activations import GeluAndMul, SiluAndMul
from .linear import Int8Linear
from .mla import LatentCache, MultiHeadLatentAttention
from .norms import RMSNorm
from .quant import QuantInt8
from .rotary import RotaryEmbedding

__all__ = [
    "GeluAndMul",
    "Int8Linear",
    "LatentCache",
    "MultiHeadLatentAttention",
    "QuantInt8",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
]
