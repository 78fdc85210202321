"""Remove what the other passes left without a user, and merge the views they put in.

Before::

    a = reshape(y, [2, 8, 64]); b = reshape(a, [16, 64]); unused = y + 1

After::

    b = reshape(y, [16, 64])
"""

from __future__ import annotations

from torch.fx import Graph

from compilepass import Pass, PassContext, Phase

from .noops import EliminateNoops

__all__ = ["CleanUp"]


class CleanUp(Pass):
    """Runs last: no-ops once more, then dead code."""

    name = "clean_up"
    phase = Phase.CLEANUP

    def run(self, graph: Graph, ctx: PassContext) -> int:
        before = len(graph.nodes)
        changes = EliminateNoops().run(graph, ctx)
        graph.eliminate_dead_code()
        return changes + max(before - changes - len(graph.nodes), 0)
