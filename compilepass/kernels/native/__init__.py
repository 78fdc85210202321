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
from .fused_quantisation import (
    FUSED,
)
from .linear import (
    fp8_linear,
    int8_dynamic_linear,
    int8_linear,
    linear,
    weight_only_int8_linear,
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
    FP8,
    FP8_MAX,
    asymmetric_quant_int8,
    group_quant_fp8,
    quant_fp8,
    quant_int8,
    static_quant_fp8,
    static_quant_int8,
)
from .rotary import (
    qk_norm_rope,
    rms_norm_rotate,
    rms_norm_rotate_qk,
    rotary_embedding,
    rotate,
    rotate_qk,
)

__all__ = [
    "FP8",
    "FP8_MAX",
    "FUSED",
    "asymmetric_quant_int8",
    "fatrelu_and_mul",
    "fp8_linear",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_int8_quant",
    "gelu_and_mul",
    "gelu_and_mul_dynamic_int8_quant",
    "gelu_fast",
    "gelu_mul",
    "gelu_mul_dynamic_int8_quant",
    "gelu_new",
    "group_quant_fp8",
    "int8_dynamic_linear",
    "int8_linear",
    "layer_norm",
    "linear",
    "mul_and_silu",
    "qk_norm_rope",
    "quant_fp8",
    "quant_int8",
    "quick_gelu",
    "relu2",
    "rms_norm",
    "rms_norm_dynamic_int8_quant",
    "rms_norm_rotate",
    "rms_norm_rotate_qk",
    "rotary_embedding",
    "rotate",
    "rotate_qk",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
    "silu_mul",
    "silu_mul_dynamic_int8_quant",
    "static_quant_fp8",
    "static_quant_int8",
    "swigluoai_and_mul",
    "weight_only_int8_linear",
]
