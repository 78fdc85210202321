"""What a replacement must keep of the values it replaces: shape, dtype, device, strides, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layout import layout
from .record import Recording
from .reject import Reject
from .rule import Rule
from .term import same

__all__ = ["breaks_contract", "shares_memory"]


def breaks_contract(rule: Rule, recording: Recording, outs: Sequence[Any]) -> Reject | None:
    """The first way in which the recorded outputs differ from the values ``outs``, as a refusal."""
    for i, (call, out) in enumerate(zip(recording.outputs, outs, strict=True)):
        if out is None:
            continue
        reject = _differs(f"output {i} of {rule}", call.meta["val"], out)
        if reject is not None:
            return reject
    return None


def _differs(what: str, got: torch.Tensor, out: torch.Tensor) -> Reject | None:
    if got.dtype != out.dtype or got.device != out.device:
        return Reject(
            "contract",
            f"{what} would be {got.dtype} on {got.device}.",
            expected=f"{out.dtype} on {out.device}",
            found=f"{got.dtype} on {got.device}",
            hint="Cast in the replacement, or list the dtypes the rule is for.",
        )
    (shape, strides, *_), (want_shape, want_strides, *_) = layout(got), layout(out)
    if not all(map(same, shape, want_shape)):
        return Reject(
            "contract",
            f"{what} would have shape {shape}.",
            expected=str(want_shape),
            found=str(shape),
        )
    if any(size != 1 and not same(strides[d], want_strides[d]) for d, size in enumerate(shape)):
        return Reject(
            "layout",
            f"{what} would have strides {strides}.",
            expected=str(want_strides),
            found=str(strides),
            hint="An input is not contiguous; make it so in the model, or in the replacement.",
        )
    return None


def shares_memory(rule: Rule, recording: Recording, outs: Sequence[Any]) -> Reject | None:
    """An output that would be a view of an input or of another output, as a refusal.

    Whoever writes to such a tensor, be it the caller who gets it, writes to the other one too.
    """
    holders = {_storage(call.meta["val"]): f"input {call.name}" for call in recording.inputs}
    for i, (call, out) in enumerate(zip(recording.outputs, outs, strict=True)):
        if out is None:
            continue
        storage = _storage(call.meta["val"])
        holder = holders.setdefault(storage, f"output {i}")
        if holder != f"output {i}" and storage != _storage(out):  # a view that was one before
            return Reject(
                "contract",
                f"output {i} of {rule} would share its memory with {holder}.",
                expected="a tensor of its own",
                found=f"a view of {holder}",
                hint="Return a clone of it.",
            )
    return None


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)
