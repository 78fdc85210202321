"""The passes that ship, one fusion a file, written on the public API alone.

They are found through the entry-point group ``compilepass.passes``, as a stranger's are.
"""

from compilepass import Pass

from .fusion.act_and_mul import FuseActAndMul
from .fusion.act_quant import FuseActQuant
from .fusion.add_rms_norm import FuseAddRMSNorm
from .fusion.fp8_linear import FuseFp8Linear
from .fusion.int8_linear import FuseInt8Linear
from .fusion.layer_norm import FuseLayerNorm
from .fusion.linear import FuseLinear
from .fusion.merge_linears import MergeLinears
from .fusion.norm_quant import FuseNormQuant
from .fusion.qk_norm_rope import FuseQKNormRope
from .fusion.qk_rope import FuseQKRope
from .fusion.rms_norm import FuseRMSNorm
from .fusion.rope import FuseRope
from .fusion.weight_only_linear import FuseWeightOnlyLinear
from .utility.clean_up import CleanUp
from .utility.coalesce_splits import CoalesceSplits
from .utility.common_subexpressions import EliminateCommonSubexpressions
from .utility.defunctionalize import Defunctionalize
from .utility.noops import EliminateNoops

__all__ = ["shipped_passes"]


def shipped_passes() -> list[type[Pass]]:
    """The passes of this package, in no particular order."""
    return [
        CleanUp,
        CoalesceSplits,
        Defunctionalize,
        EliminateCommonSubexpressions,
        EliminateNoops,
        FuseActAndMul,
        FuseActQuant,
        FuseAddRMSNorm,
        FuseFp8Linear,
        FuseInt8Linear,
        FuseLayerNorm,
        FuseLinear,
        FuseNormQuant,
        FuseQKNormRope,
        FuseQKRope,
        FuseRMSNorm,
        FuseRope,
        FuseWeightOnlyLinear,
        MergeLinears,
    ]
