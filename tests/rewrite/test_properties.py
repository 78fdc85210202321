"""Random programs with planted patterns and near misses: every plant is found, no near miss is.

``pytest --hypothesis-profile=thorough tests/rewrite/test_properties.py`` runs thousands. A failure
prints its program; the seed stands in the first lines of pytest's output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.utils._pytree import tree_flatten

from .capture import compiled
from .planted import MISSES, PLANTS, Plant, found

WIDTH, MOST_PLANTS, MOST_MISSES = 16, 3, 2
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
PLANTED: dict[str, Plant] = {**PLANTS, **MISSES}


@dataclass(frozen=True)
class Program:
    """Steps and plants in order, each with the positions of its operands among earlier values."""

    lines: tuple[tuple[str, int, int], ...]
    rows: int
    dtype: torch.dtype
    dynamic: bool

    def __call__(self, x: Tensor, y: Tensor, m: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        values, left = [x, y], list(weights)
        kept: list[Tensor] = []
        for name, i, j in self.lines:
            a, b = values[i % len(values)], values[j % len(values)]
            if name in STEPS:
                values.append(STEPS[name](a, b, m))
                continue
            plant = PLANTED[name]
            outputs = plant.fn(a * plant.scale if plant.scale != 1 else a, b, left.pop())
            values += outputs[:1] if plant.goes_on else ()
            kept += outputs
        return (*kept, values[-1] * 2)

    @property
    def planted(self) -> Counter[str]:
        """The kinds of the kernels that are to be found."""
        return Counter(k for n, *_ in self.lines if n in PLANTED for k in PLANTED[n].kernels)


@st.composite
def programs(draw: Any) -> Program:
    def some(names: dict[str, Any], most: int) -> Any:
        line = st.tuples(st.sampled_from(sorted(names)), st.integers(0, 9), st.integers(0, 9))
        return draw(st.lists(line, max_size=most))

    lines = some(STEPS, 8) + some(PLANTS, MOST_PLANTS) + some(MISSES, MOST_MISSES)
    return Program(
        tuple(draw(st.permutations(lines))),
        draw(st.sampled_from([6, WIDTH])),  # as many rows as columns: they are not told by sizes
        draw(st.sampled_from(list(TOLERANCE))),
        draw(st.booleans()),
    )


@given(programs())
def test_every_plant_is_found_and_nothing_else_changes(program: Program) -> None:
    note(str(program))
    torch.manual_seed(0)
    rows = (program.rows, WIDTH)
    args = [torch.randn(rows), torch.randn(rows), torch.randn(WIDTH, WIDTH) / 4]
    args += [torch.rand(WIDTH) for _ in range(MOST_PLANTS + MOST_MISSES)]
    args = [a.to(program.dtype) for a in args]
    for arg in args:
        torch._dynamo.mark_static(arg, arg.dim() - 1)
    done = compiled(program, args, dynamic=program.dynamic)
    note(str(done.graph))
    assert found(done.kernels) == program.planted
    assert done.changes_again == 0
    done.graph.lint()
    assert_metadata_is_right(done.graph)
    for mine, theirs in zip(done.outputs, done.outputs_before, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if not done.changes:
            assert torch.equal(mine, theirs)
        elif mine.dtype == torch.int8:  # half a step is rounded either way
            assert (mine.short() - theirs.short()).abs().max() <= _steps(program.dtype)
        else:
            error = (mine.double() - theirs.double()).abs().max()
            assert error <= TOLERANCE[program.dtype] * (1 + theirs.double().abs().max())


def _steps(dtype: torch.dtype) -> int:
    """How far a quantised value may be off: by its rounding, and by that of its operand."""
    return 1 + int(2 * 127 * TOLERANCE[dtype])


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
