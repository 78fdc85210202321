"""Quantise the linear layers of a model that is there already, in place.

    report = compilepass.quantize_(model, "int8", filter=lambda name, linear: name != "lm_head")
    print(report)

Each ``nn.Linear`` becomes one of the toolkit's layers, under its old name and with its old bias, so
that a state dict of one quantised model fits another. What cannot be swapped without changing what
the model means is left, and the report says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from .errors import OpTypeError, OpValueError, did_you_mean
from .layers import Fp8Linear, Int8Linear, WeightOnlyInt8Linear

__all__ = ["SCHEMES", "Kept", "QuantizeReport", "quantize_"]

Filter = str | Callable[[str, nn.Linear], bool]

SCHEMES: dict[str, type[Int8Linear] | type[WeightOnlyInt8Linear] | type[Fp8Linear]] = {
    "int8": Int8Linear,
    "weight_only_int8": WeightOnlyInt8Linear,
    "fp8": Fp8Linear,
}


@dataclass(frozen=True)
class Kept:
    """A linear layer that was left as it is, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class QuantizeReport:
    """What ``quantize_`` did: names of layers in the model's order, and bytes of their state."""

    scheme: str
    swapped: tuple[str, ...]
    kept: tuple[Kept, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        layer = SCHEMES[self.scheme].__name__
        lines = [f"{self.scheme}: {len(self.swapped)} of {self.linears} linear layers are {layer}"]
        if self.swapped:
            before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
            lines[0] += f", {after:.2f} MiB instead of {before:.2f}"
        lines += [f"  swapped {name}" for name in self.swapped]
        lines += [f"  kept {kept.name}: {kept.reason}" for kept in self.kept]
        return "\n".join(lines)

    @property
    def linears(self) -> int:
        """How many linear layers were looked at."""
        return len(self.swapped) + len(self.kept)


def quantize_(
    model: nn.Module, scheme: str = "int8", filter: Filter | None = None, **op_options: bool
) -> QuantizeReport:
    """Swap each ``nn.Linear`` of ``model``, in place, for a layer with quantised weights.

    Args:
        scheme: ``"int8"`` (weights and, row by row, inputs), ``"weight_only_int8"`` (inputs as
            they are) or ``"fp8"`` (both).
        filter: which ones, by fully qualified name: a pattern with ``*``, ``?`` and ``[…]`` (which
            may match across dots), or a function of the name and the layer. All without.
        op_options: those of ``CustomOp`` (``enforce_enable``, …), for each new layer. Whether it
            runs a kernel is decided when it is built, under the active configuration.

    Left alone are layers whose weight belongs to another module too (``lm_head`` tied to the
    embedding), subclasses of ``nn.Linear``, and those with hooks. A module that stands at several
    places of the model stays one.

    Raises:
        OpValueError: no such scheme.
        OpTypeError: ``model`` is an ``nn.Linear`` itself, which has no place to be swapped at.
    """
    if scheme not in SCHEMES:
        raise OpValueError(
            f"quantize_ got scheme={scheme!r}", hint=did_you_mean(str(scheme), SCHEMES)
        )
    if isinstance(model, nn.Linear):
        raise OpTypeError(
            "quantize_ got a linear layer, not a model",
            why="A layer is swapped at its place in a model.",
            hint=f"Use {SCHEMES[scheme].__name__}.from_linear.",
        )
    selected = _predicate(filter)
    owners = owners_of(model)
    places: dict[nn.Linear, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            places[module].append(name)
    swapped: list[str] = []
    kept: list[Kept] = []
    before = after = 0
    for linear, names in places.items():
        chosen = any(selected(name, linear) for name in names)
        reason = obstacle(linear, owners) if chosen else "the filter does not select it"
        if reason is not None:
            kept += [Kept(name, reason) for name in names]
            continue
        layer = SCHEMES[scheme].from_linear(linear, **op_options)
        for name in names:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer)
        swapped += names
        before, after = before + _bytes(linear), after + _bytes(layer)
    return QuantizeReport(scheme, tuple(swapped), tuple(kept), before, after)


def _predicate(filter: Filter | None) -> Callable[[str, nn.Linear], bool]:
    if filter is None:
        return lambda name, linear: True
    if isinstance(filter, str):
        return lambda name, linear: fnmatchcase(name, filter)
    return filter


def owners_of(model: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, with its name there."""
    owners: dict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            owners[parameter].append((module, name))
    return owners


def obstacle(linear: nn.Linear, owners: dict[Tensor, list[tuple[nn.Module, str]]]) -> str | None:
    """Why a linear layer cannot be swapped, or ``None``."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__qualname__}, which may compute something else"
    for mine, parameter in linear.named_parameters(recurse=False):
        others = [name for module, name in owners[parameter] if module is not linear]
        if others:
            return f"its {mine} is {', '.join(others)} too"
    if linear.weight.is_meta:
        return "its weight is on the meta device, without values"
    if not linear.weight.is_floating_point():
        return f"its weight is {linear.weight.dtype}"
    if linear.weight.numel() == 0:
        return "its weight is empty"
    hooks = (
        linear._forward_hooks,
        linear._forward_pre_hooks,
        linear._backward_hooks,
        linear._backward_pre_hooks,
    )
    if any(hooks):
        return "it has hooks, which would be lost"
    return None


def _bytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
