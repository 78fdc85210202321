"""What a pass is.

A pass is a frozen dataclass: its fields are its options, its class attributes say when it runs.

    class FuseNormQuant(FusionPass):
        name = "fuse_norm_quant"
        after = ("fuse_add_rms_norm",)
        kernels = ("compilepass::rms_norm_dynamic_int8_quant",)

        min_rows: int = 1                      # an option: "+fuse_norm_quant{min_rows=16}"

        def rules(self, ctx):
            return [Rule(pattern, replacement, inputs={...})]

Invariants, each checked for every shipped pass: the graph stays valid and sorted, ``meta["val"]``
stays right, nothing is kept between runs, the result is the same every time, and a second run
changes nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar

from torch.fx import Graph

from ..errors import OpTypeError
from ..rewrite import Reject, Rule

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
else:
    from typing_extensions import dataclass_transform

__all__ = ["FusionPass", "Pass", "PassContext", "Phase"]


class Phase(IntEnum):
    """When a pass runs; within a phase the declared edges decide, then the names."""

    CANONICALIZE = 0
    FUSE = 1
    LOWER = 2
    CLEANUP = 3


@dataclasses.dataclass(frozen=True)
class PassContext:
    """What a pass may know about the graph at hand.

    ``device_type`` is that of the graph's tensors (the first one's, where they are mixed),
    ``backend`` is ``"inductor"`` or ``"fx"``; ``is_inference`` is false for both graphs of a model
    that is trained; ``graph`` names the graph in reports and dumps.
    """

    device_type: str
    backend: str
    is_inference: bool
    graph: str = dataclasses.field(default="graph", compare=False)


@dataclass_transform(frozen_default=True)
class Pass:
    """A transformation of a graph in place; subclasses become frozen dataclasses by themselves.

    ``default`` says whether the base word ``default`` includes it. ``requires`` names passes that
    must run before it; ``after`` and ``before`` order it against passes that may be absent.
    ``covers`` names the kinds of sites of which each match takes one (:mod:`compilepass.sites`).
    """

    name: ClassVar[str] = ""
    phase: ClassVar[Phase] = Phase.FUSE
    default: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()
    kernels: ClassVar[tuple[str, ...]] = ()
    covers: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True)(cls)
        for attribute in ("requires", "after", "before", "kernels", "covers"):
            value = getattr(cls, attribute)
            if isinstance(value, str) or not all(isinstance(v, str) for v in value):
                raise OpTypeError(
                    f"{cls.__qualname__}.{attribute} is {value!r}",
                    why="It must be a tuple of names.",
                    hint=f"Write {attribute} = ({value!r},)." if isinstance(value, str) else "",
                )

    def supports(self, ctx: PassContext) -> Reject | None:
        """Why the pass should not run on this graph, or ``None``."""
        return None

    def run(self, graph: Graph, ctx: PassContext) -> int:
        """Transform ``graph`` in place and return the number of changes."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define run()")

    def options(self) -> dict[str, Any]:
        """The pass's options with their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


class FusionPass(Pass):
    """A pass made of rewrite rules, applied in the order in which :meth:`rules` returns them."""

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        """The rules for ``ctx``, the larger patterns first; they depend on nothing else."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define rules()")
