"""Rotary position embedding in one kernel, however it is spelled.

Before::

    x1, x2 = x[..., :half], x[..., half:]               # or x[..., ::2], x[..., 1::2]
    y = x * cos + cat((-x2, x1), -1) * sin              # or stack((-x2, x1), -1).flatten(-2)
    y = cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)

After::

    y = compilepass.rotate(x, cos, sin, interleaved, per_pair)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native
from compilepass.rewrite import Input

__all__ = ["FuseRope"]

HALF = (torch.bfloat16, torch.float16)
FLOATING = (torch.float32, *HALF)


class FuseRope(FusionPass):
    """Queries and keys are rotated one by one. The rest of a head that is not rotated belongs to
    the kernel where it is put back with one ``cat``.
    """

    name = "fuse_rope"
    covers = ("rotary",)
    # the sum of a rotation is no residual, though a norm may follow it (HunYuan)
    before = ("fuse_add_rms_norm", "fuse_norm_quant", "fuse_rms_norm")
    requires = ("eliminate_common_subexpressions",)
    kernels = ("compilepass::rotate",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # what is wider comes first: around a rotation there may be casts, or a cat
        flags = [(*f, wide) for wide in (True, False) for f in product((False, True), repeat=2)]
        wider_tables = _whole_with_float_tables()
        whole = (_whole(*f) for f in flags)
        return [wider_tables, *(_partial(*f) for f in flags if not f[-1]), *whole]


def _whole(interleaved: bool, per_pair: bool, wide: bool) -> Rule:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return native.rotate(x, cos, sin, interleaved, per_pair, wide)

    def fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.ops.compilepass.rotate(x, cos, sin, interleaved, per_pair, wide)  # type: ignore[no-any-return]

    table = Input(("...", "I" if per_pair else "H"), broadcasts=True)
    heads = Input(("...", "2*I" if per_pair else "H"))
    inputs = {"x": heads, "cos": table, "sin": table}
    name = _name("rotate", interleaved, per_pair, wide)
    return Rule(rotate, fused, inputs, name=name, dtypes=HALF if wide else FLOATING)


def _whole_with_float_tables() -> Rule:
    """Heads of 16 bits that meet tables of float32, as in OLMo: rounded once, behind the sum."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return native.rotate(x, cos, sin).to(x.dtype)

    def fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.ops.compilepass.rotate(x.float(), cos, sin).to(x.dtype)  # type: ignore[no-any-return]

    table = Input(("...", "H"), torch.float32, broadcasts=True)
    inputs = {"x": Input(("...", "H")), "cos": table, "sin": table}
    return Rule(rotate, fused, inputs, name="rotate_float_tables", dtypes=HALF)


def _partial(interleaved: bool, per_pair: bool, wide: bool) -> Rule:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
        return native.rotate(x, cos, sin, interleaved, per_pair, wide)

    def fused(x: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
        return torch.ops.compilepass.rotate(x, cos, sin, interleaved, per_pair, wide)  # type: ignore[no-any-return]

    table = Input(("...", "width"), broadcasts=True)
    inputs = {"x": Input(("...", "H")), "cos": table, "sin": table}
    name = _name("partial", interleaved, per_pair, wide)
    return Rule(rotate, fused, inputs, name=name, dtypes=HALF if wide else FLOATING)


def _name(what: str, interleaved: bool, per_pair: bool, wide: bool) -> str:
    flags = {"interleaved": interleaved, "per_pair": per_pair, "wide": wide}
    return "_".join((what, *(name for name, on in flags.items() if on)))
