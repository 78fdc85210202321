"""Put mutating ops back in place of their functional form.

Before::

    out = auto_functionalized_v2(mylib.scale_, by=2.0, _x_base_index=0, _all_bases=[y])
    z = out[1]

After::

    mylib.scale_(y, by=2.0)                                      # y is not used any more
    z = y
"""

from __future__ import annotations

from torch.fx import Graph

from compilepass import Pass, PassContext, Phase, Reject
from compilepass.inductor import defunctionalize

__all__ = ["Defunctionalize"]


class Defunctionalize(Pass):
    """For ``backend="fx"``, which runs the graph as it is; Inductor does the same by itself."""

    name = "defunctionalize"
    phase = Phase.LOWER

    def supports(self, ctx: PassContext) -> Reject | None:
        if ctx.backend == "inductor":
            return Reject("check", "Inductor does this itself, after all passes")
        return None

    def run(self, graph: Graph, ctx: PassContext) -> int:
        return defunctionalize(graph)
