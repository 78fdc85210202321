"""The mathematics of every shipped kernel, as pure functions of plain torch ops.

These functions are the reference that the platform kernels are tested against, the native forward
of the layers, and the source that rewrite patterns are traced from. So they keep three invariants:
no state, no branch on a tensor's size, and any leading rank.

A kernel's rounding contract is read off here: where a ``.to(dtype)`` stands, the value is rounded.
"""

from .activations import (
    fatrelu_and_mul,
    gelu_and_mul,
    gelu_and_mul_dynamic_int8_quant,
    gelu_fast,
    gelu_mul,
    gelu_mul_dynamic_int8_quant,
    gelu_new,
    mul_and_silu,
    quick_gelu,
    relu2,
    silu_and_mul,
    silu_and_mul_dynamic_int8_quant,
    silu_mul,
    silu_mul_dynamic_int8_quant,
    swigluoai_and_mul,
)
from .linear import (
    int8_linear,
)
from .norms import (
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_add_rms_norm_dynamic_int8_quant,
    layer_norm,
    rms_norm,
    rms_norm_dynamic_int8_quant,
)
from .quantisation import (
    quant_int8,
)
from .rotary import (
    qk_norm_rope,
    rms_norm_rotate,
    rotary_embedding,
    rotate,
)

__all__ = [
    "fatrelu_and_mul",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_int8_quant",
    "gelu_and_mul",
    "gelu_and_mul_dynamic_int8_quant",
    "gelu_fast",
    "gelu_mul",
    "gelu_mul_dynamic_int8_quant",
    "gelu_new",
    "int8_linear",
    "layer_norm",
    "mul_and_silu",
    "qk_norm_rope",
    "quant_int8",
    "quick_gelu",
    "relu2",
    "rms_norm",
    "rms_norm_dynamic_int8_quant",
    "rms_norm_rotate",
    "rotary_embedding",
    "rotate",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
    "silu_mul",
    "silu_mul_dynamic_int8_quant",
    "swigluoai_and_mul",
]
