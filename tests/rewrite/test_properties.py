"""Random programs with planted patterns: every plant is found, nothing else changes.

``pytest --hypothesis-profile=thorough tests/rewrite/test_properties.py`` runs thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.utils._pytree import tree_flatten

from .capture import compiled
from .spellings import rms_norm_llama, rms_norm_over_root, rms_norm_sum_over_count

ROWS, WIDTH, MOST_PLANTS = 6, 16, 3
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2}

#: steps from two earlier values to a new one, all of one shape and near one in size
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda a, b, m: a + b,
    "average": lambda a, b, m: (a + b) * 0.5,
    "product": lambda a, b, m: torch.tanh(a) * b,
    "negation": lambda a, b, m: -a,
    "matmul": lambda a, b, m: a @ m,
    "round trip": lambda a, b, m: a.double().to(a.dtype),
    "half": lambda a, b, m: a.half().to(a.dtype),
    "centred": lambda a, b, m: a - b.mean(-1, keepdim=True),
    "scaled": lambda a, b, m: a / (1 + b.abs().amax(0, keepdim=True)),
    "view": lambda a, b, m: a.view(2, -1, WIDTH).reshape(a.shape),
    "transposed": lambda a, b, m: a.t().contiguous().t().contiguous(),
    "halves": lambda a, b, m: torch.cat(a.chunk(2, -1)[::-1], -1),
}
#: patterns, each with a weight of its own, so that no two are the same value
PLANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "norm": lambda a, b, w: rms_norm_llama(a, w),
    "norm over root": lambda a, b, w: rms_norm_over_root(a, w),
    "norm of sum": lambda a, b, w: rms_norm_sum_over_count(a + b, w),
    "gate": lambda a, b, w: F.silu(a * w) * b,
    "gate of halves": lambda a, b, w: _gate_of_halves(torch.cat((a, b * w), -1)),
}
KERNELS = {
    "norm": ("rms_norm", "fused_add_rms_norm"),
    "gate": ("silu_mul", "silu_and_mul"),
}


def _gate_of_halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@dataclass(frozen=True)
class Program:
    """Steps and plants in order, each with the positions of its operands among earlier values."""

    lines: tuple[tuple[str, int, int], ...]
    dtype: torch.dtype
    dynamic: bool

    def __call__(self, x: Tensor, y: Tensor, m: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        values, left = [x, y], list(weights)
        for name, i, j in self.lines:
            a, b = values[i % len(values)], values[j % len(values)]
            step = STEPS.get(name)
            values.append(step(a, b, m) if step else PLANTS[name](a, b, left.pop()))
        kept = [v for v, (name, *_) in zip(values[2:], self.lines, strict=True) if name in PLANTS]
        return (*kept, values[-1] * 2)

    def planted(self, kind: str) -> int:
        return sum(name.startswith(kind) for name, *_ in self.lines if name in PLANTS)


@st.composite
def programs(draw: Any) -> Program:
    def some(names: dict[str, Any], most: int) -> Any:
        line = st.tuples(st.sampled_from(sorted(names)), st.integers(0, 9), st.integers(0, 9))
        return draw(st.lists(line, max_size=most))

    lines = draw(st.permutations(some(STEPS, 8) + some(PLANTS, MOST_PLANTS)))
    return Program(tuple(lines), draw(st.sampled_from(list(TOLERANCE))), draw(st.booleans()))


@given(programs())
def test_every_plant_is_found_and_nothing_else_changes(program: Program) -> None:
    torch.manual_seed(0)
    args = [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH) / 4]
    args += [torch.rand(WIDTH) for _ in range(MOST_PLANTS)]
    args = [a.to(program.dtype) for a in args]
    for arg in args:
        torch._dynamo.mark_static(arg, arg.dim() - 1)
    done = compiled(program, args, dynamic=program.dynamic)
    note(str(done.graph))
    for kind, kernels in KERNELS.items():
        assert sum(done.kernels.get(k, 0) for k in kernels) == program.planted(kind)
    assert done.changes_again == 0
    done.graph.lint()
    assert_metadata_is_right(done.graph)
    for mine, theirs in zip(done.result, program(*args), strict=True):
        error = (mine.double() - theirs.double()).abs().max()
        assert error <= TOLERANCE[program.dtype] * (1 + theirs.double().abs().max())


def assert_metadata_is_right(graph: Graph) -> None:
    """Each node's fake value is what the node gives for the fake values of its inputs."""

    class Check(Interpreter):
        def run_node(self, n: Node) -> Any:
            out = super().run_node(n)
            if n.op == "call_function":
                assert _layouts(out) == _layouts(n.meta["val"]), n.format_node()
            return out

    inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    mode = next(v.fake_mode for v in inputs if isinstance(v, Tensor))
    with mode:
        Check(torch.fx.GraphModule({}, graph)).run(*inputs)


def _layouts(value: Any) -> list[Any]:
    return [
        (tuple(map(str, v.shape)), tuple(map(str, v.stride())), v.dtype, v.device)
        if isinstance(v, Tensor)
        else str(v)
        for v in tree_flatten(value)[0]
    ]
