"""A norm or gate with a quantisation of its result: every source with every quantisation.

``FUSED`` has them by name, ``<source>_<quantisation>_quant``. Arguments are the source's tensors,
then the quantisation's settings if it has any, then the source's options; results are those of the
quantisation, then what the source returns beside its first.

    q, scale = FUSED["rms_norm_group_fp8_quant"](x, weight, 128, 1e-6)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .activations import (
    fatrelu_and_mul,
    gelu_and_mul,
    gelu_mul,
    mul_and_silu,
    silu_and_mul,
    silu_mul,
    swigluoai_and_mul,
)
from .norms import fused_add_layer_norm, fused_add_rms_norm, layer_norm, rms_norm
from .quantisation import (
    asymmetric_quant_int8,
    group_quant_fp8,
    quant_fp8,
    quant_int8,
    static_quant_fp8,
    static_quant_int8,
)

__all__ = ["FUSED", "QUANTISATIONS", "SOURCES", "Quantisation", "Source", "fuse"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Source:
    """What makes rows: its tensors and its options, as a schema writes them."""

    function: Function
    tensors: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantisation:
    """What makes of rows fp8 or int8, its settings as a schema writes them, how many results."""

    function: Function
    settings: tuple[str, ...] = ()
    results: int = 2


NORM_OPTIONS = ("float eps", "str variant='llama'")
AFFINE = ("Tensor? weight", "Tensor? bias")

SOURCES = {
    "rms_norm": Source(rms_norm, ("Tensor x", "Tensor weight"), NORM_OPTIONS),
    "fused_add_rms_norm": Source(
        fused_add_rms_norm, ("Tensor x", "Tensor residual", "Tensor weight"), NORM_OPTIONS
    ),
    "layer_norm": Source(layer_norm, ("Tensor x", *AFFINE), ("float eps",)),
    "fused_add_layer_norm": Source(
        fused_add_layer_norm, ("Tensor x", "Tensor residual", *AFFINE), ("float eps",)
    ),
    "silu_mul": Source(silu_mul, ("Tensor gate", "Tensor up")),
    "silu_and_mul": Source(silu_and_mul, ("Tensor x",)),
    "mul_and_silu": Source(mul_and_silu, ("Tensor x",)),
    "gelu_mul": Source(gelu_mul, ("Tensor gate", "Tensor up"), ("str approximate",)),
    "gelu_and_mul": Source(gelu_and_mul, ("Tensor x",), ("str approximate",)),
    "fatrelu_and_mul": Source(fatrelu_and_mul, ("Tensor x",), ("float threshold",)),
    "swigluoai_and_mul": Source(
        swigluoai_and_mul, ("Tensor x",), ("float alpha=1.702", "float limit=7.0")
    ),
}

QUANTISATIONS = {
    "dynamic_int8": Quantisation(quant_int8),
    "asymmetric_int8": Quantisation(asymmetric_quant_int8, results=3),
    "static_int8": Quantisation(static_quant_int8, ("Tensor scale",), 1),
    "static_asymmetric_int8": Quantisation(
        static_quant_int8, ("Tensor scale", "Tensor zero_point"), 1
    ),
    "dynamic_fp8": Quantisation(quant_fp8),
    "static_fp8": Quantisation(static_quant_fp8, ("Tensor scale",), 1),
    "group_fp8": Quantisation(group_quant_fp8, ("int group",)),
}


def fuse(source: Source, quantisation: Quantisation) -> Function:
    """The quantisation of a source's first result, as a function of their arguments in order."""
    names = [_name(a) for a in (*source.tensors, *quantisation.settings, *source.options)]
    tensors = len(source.tensors)
    both = tensors + len(quantisation.settings)

    def fused(*args: Any, **kwargs: Any) -> Any:
        args += tuple(kwargs[name] for name in names[len(args) :] if name in kwargs)
        made = source.function(*args[:tensors], *args[both:])
        first, *rest = made if isinstance(made, tuple) else (made,)
        quantised = quantisation.function(first, *args[tensors:both])
        results = (*(quantised if isinstance(quantised, tuple) else (quantised,)), *rest)
        return results if len(results) > 1 else results[0]

    return fused


def _name(argument: str) -> str:
    return argument.split()[1].partition("=")[0]


def _all_fused() -> dict[str, Function]:
    functions = {}
    for source_name, source in SOURCES.items():
        for name, quantisation in QUANTISATIONS.items():
            function = fuse(source, quantisation)
            function.__qualname__ = function.__name__ = f"{source_name}_{name}_quant"
            functions[function.__name__] = function
    return functions


FUSED = _all_fused()
