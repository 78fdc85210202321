"""The custom ops and layers that ship, each with a native forward and the toolkit's own kernels.

Every op takes the options of ``CustomOp`` (``enforce_enable``, ``compile_native``) as keywords.
Enabled, it calls its op in ``torch.ops.compilepass``, which finds the best kernel for the device
and runs native where there is none; disabled, it runs the same mathematics as plain PyTorch code.

    with use_config(CompilationConfig(custom_ops=["none", "+rms_norm"])):
        norm = RMSNorm(4096)
    normed, total = norm(x, residual)
"""

from .activations import (
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    MulAndSilu,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiluAndMul,
    SwigluOAIAndMul,
)
from .linear import Int8Linear
from .mla import LatentCache, MultiHeadLatentAttention
from .norms import GemmaRMSNorm, LayerNorm, RMSNorm
from .quant import QuantInt8
from .rotary import MRotaryEmbedding, QKNormRope, RotaryEmbedding
from .rotary_scaling import Llama3Scaling, RotaryScaling, YarnScaling

__all__ = [
    "FastGELU",
    "FatreluAndMul",
    "GeluAndMul",
    "GemmaRMSNorm",
    "Int8Linear",
    "LatentCache",
    "LayerNorm",
    "Llama3Scaling",
    "MRotaryEmbedding",
    "MulAndSilu",
    "MultiHeadLatentAttention",
    "NewGELU",
    "QKNormRope",
    "QuantInt8",
    "QuickGELU",
    "RMSNorm",
    "ReLUSquaredActivation",
    "RotaryEmbedding",
    "RotaryScaling",
    "SiluAndMul",
    "SwigluOAIAndMul",
    "YarnScaling",
]
