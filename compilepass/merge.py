"""Lay the weights of linear layers that share an input side by side, in place.

    print(compilepass.merge_linears_(model))          # q, k and v; gate and up; once, after loading

The weights become rows of one parameter, which the pass ``merge_linears`` multiplies by at once. A
layer computes what it did, its state dict has its old keys, and the memory is that of before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import OpValueError
from .quantize import Kept, obstacle, owners_of

__all__ = ["GROUPS", "MergeReport", "PackedLinear", "merge_linears_"]

#: the names under which models keep linear layers that have one input
GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)


class PackedLinear(nn.Linear):
    """A linear layer whose weight is some rows of a parameter, ``packed``, that others share.

    The graph shows the rows as a slice of ``packed``, so a pass can tell that weights lie side by
    side, and that stays true whatever is written to them.
    """

    packed: nn.Parameter

    def __init__(self, linear: nn.Linear, packed: nn.Parameter, start: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.start = start
        self.packed = packed
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.packed[self.start : self.start + self.out_features]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, value in self._state():
            destination[prefix + name] = value if keep_vars else value.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = dict(self._state())
        for name, value in mine.items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != value.shape:
                shapes = f"{tuple(given.shape)}, where the layer has {tuple(value.shape)}"
                error_msgs.append(f"{prefix}{name} has the shape {shapes}")
            else:
                with torch.no_grad():
                    value.copy_(given)
        known = {prefix + name for name in mine}
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias


@dataclass(frozen=True)
class MergeReport:
    """What ``merge_linears_`` did: the names of layers that share a parameter now, and the rest."""

    groups: tuple[tuple[str, ...], ...]
    kept: tuple[Kept, ...]

    def __str__(self) -> str:
        linears = sum(map(len, self.groups))
        lines = [f"{linears} linear layers share {len(self.groups)} weights"]
        lines += [f"  packed {', '.join(group)}" for group in self.groups]
        lines += [f"  kept {kept.name}: {kept.reason}" for kept in self.kept]
        return "\n".join(lines)


def merge_linears_(model: nn.Module, groups: Sequence[Sequence[str]] = GROUPS) -> MergeReport:
    """Let layers of ``model`` that stand beside one another share one parameter, in place.

    Args:
        groups: the names of such layers in the module that holds them. That they have one input is
            not needed: what has another input is multiplied by itself.

    A group is left as it is where a layer of it is no plain ``nn.Linear``, has hooks or a weight
    that belongs to another module too, or where widths, dtypes or devices differ; the report says
    why. Parameters that an optimiser holds are replaced, so make it afterwards.

    Raises:
        OpValueError: a group of fewer than two names.
    """
    for names in groups:
        if isinstance(names, str) or len(names) < 2:
            raise OpValueError(
                f"merge_linears_ got the group {names!r}",
                why="It takes two layers or more to share a parameter.",
                hint='Write groups=[("gate_proj", "up_proj")].',
            )
    owners = owners_of(model)
    done: list[tuple[str, ...]] = []
    kept: list[Kept] = []
    for path, parent in list(model.named_modules()):
        for names in groups:
            layers = [parent._modules.get(name) for name in names]
            linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
            if len(linears) < len(names) or any(isinstance(m, PackedLinear) for m in linears):
                continue
            full = tuple(f"{path}.{name}" if path else name for name in names)
            reasons = [(name, obstacle(m, owners)) for name, m in zip(full, linears, strict=True)]
            blocked = [Kept(name, reason) for name, reason in reasons if reason is not None]
            blocked = blocked or _differences(full, linears)
            if blocked:
                kept += blocked
                continue
            for name, layer in zip(names, _packed(linears), strict=True):
                setattr(parent, name, layer)
            done.append(full)
    return MergeReport(tuple(done), tuple(kept))


def _differences(names: Sequence[str], linears: Sequence[nn.Linear]) -> list[Kept]:
    """The layers whose weights could not be rows of the first one's."""

    def kind(linear: nn.Linear) -> tuple[Any, ...]:
        weight = linear.weight
        return linear.in_features, weight.dtype, str(weight.device), weight.requires_grad

    wanted = kind(linears[0])
    return [
        Kept(name, f"its weight is {kind(linear)}, that of {names[0]} {wanted}")
        for name, linear in zip(names, linears, strict=True)
        if kind(linear) != wanted
    ]


def _packed(linears: Sequence[nn.Linear]) -> Iterator[PackedLinear]:
    weights = [linear.weight.detach() for linear in linears]
    packed = nn.Parameter(torch.cat(weights), requires_grad=linears[0].weight.requires_grad)
    start = 0
    for linear in linears:
        yield PackedLinear(linear, packed, start)
        start += linear.out_features
