"""Native forwards that are compiled on their own, and the dims that are dynamic in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compilepass.config import CompilationConfig, use_config
from compilepass.errors import OpTypeError, OpValueError
from compilepass.ops import CustomOp, maybe_compile, maybe_disable_graph_partition
from compilepass.ops.dynamic_args import DynamicArgs
from compilepass.platforms import CpuPlatform, use_platform

BACKEND = "counting_for_tests"
compiles: list[torch.fx.GraphModule] = []


class CountingPlatform(CpuPlatform):
    """A CPU whose simple backend counts the graphs it gets and runs them as they are."""

    name = "counting"
    simple_compile_backend = BACKEND


@pytest.fixture
def counted() -> Iterator[list[torch.fx.GraphModule]]:
    from torch._dynamo import list_backends, register_backend

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiles.append(graph)
        return graph.forward

    if BACKEND not in list_backends():
        register_backend(backend, name=BACKEND)  # type: ignore[arg-type]
    compiles.clear()
    torch.compiler.reset()
    with use_platform(CountingPlatform()), use_config(CompilationConfig()):
        yield compiles


# When the function itself comes back


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("config", [{"mode": "none"}, {"backend": "eager"}])
def test_nothing_is_compiled_without_compilation(config: dict[str, Any]) -> None:
    with use_config(CompilationConfig(**config)):
        assert maybe_compile(double) is double


def test_nothing_is_compiled_when_disabled_or_on_an_eager_platform() -> None:
    class Eager(CpuPlatform):
        simple_compile_backend = "eager"

    with use_config(CompilationConfig()):
        assert maybe_compile(double, enable=False) is double
        assert maybe_compile(double) is not double
        with use_platform(Eager()):
            assert maybe_compile(double) is double


# What is dynamic


def test_a_declared_dim_is_dynamic_and_the_others_static(counted: list[Any]) -> None:
    fn = maybe_compile(lambda x: x * 2, dynamic_arg_dims={"x": 0})
    for rows in (3, 5, 9):
        assert fn(torch.ones(rows, 4)).shape == (rows, 4)
    assert len(counted) == 1
    fn(torch.ones(3, 8))
    assert len(counted) == 2


def test_without_a_declaration_all_dims_are_dynamic(counted: list[Any]) -> None:
    fn = maybe_compile(lambda x: x * 2)
    for shape in ((3, 4), (5, 6), (9, 8)):
        fn(torch.ones(shape))
    assert len(counted) == 1


def test_negative_dims_mark_the_right_one(counted: list[Any]) -> None:
    fn = maybe_compile(lambda x: x * 2, dynamic_arg_dims={"x": -1})
    for columns in (3, 5):
        fn(torch.ones(4, columns))
    assert len(counted) == 1


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_zero_and_one_run_uncompiled_and_right(counted: list[Any], size: int) -> None:
    fn = maybe_compile(lambda x: x * 2, dynamic_arg_dims={"x": 0})
    assert fn(torch.ones(size, 4)).tolist() == [[2.0] * 4] * size
    assert counted == []


def test_the_marks_do_not_stay_on_the_callers_tensor(counted: list[Any]) -> None:
    fn = maybe_compile(lambda x: x * 2, dynamic_arg_dims={"x": 0})
    x = torch.ones(3, 4)
    fn(x)
    assert vars(x) == {}
    torch._dynamo.mark_dynamic(x, 1)
    before = {k: copy.copy(v) for k, v in vars(x).items()}
    fn(x)
    assert vars(x) == before


def test_a_traced_caller_inlines_the_function(counted: list[Any]) -> None:
    fn = maybe_compile(lambda x: x * 2, dynamic_arg_dims={"x": 0})
    outer = torch.compile(lambda x: fn(x) + 1, backend="eager", fullgraph=True)
    assert outer(torch.ones(3)).tolist() == [3.0] * 3
    assert counted == []


# Binding a call


def declared(x: Any, y: Any = None, *rest: Any, scale: Any = None, **more: Any) -> None: ...


A, B, C = torch.ones(2, 3), torch.ones(4, 5), torch.ones(6, 7)


@pytest.mark.parametrize(
    ("spec", "args", "kwargs", "expected"),
    [
        ({"x": 0}, (A,), {}, [(A, 0)]),
        ({"x": [0, -1]}, (), {"x": A}, [(A, 0), (A, 1)]),
        ({"x": (-2,), "y": -1}, (A, B), {}, [(A, 0), (B, 1)]),
        ({"y": 0}, (A,), {}, []),
        ({"rest": 0}, (A, A, B, C), {}, [(B, 0), (C, 0)]),
        ({"scale": {1: "n"}}, (A,), {"scale": B}, [(B, 1)]),
        ({"more": 1}, (A,), {"bias": C}, [(C, 1)]),
        ({"bias": 1}, (A,), {"bias": C}, [(C, 1)]),
        ({"bias": 1}, (A,), {}, []),
        ({"x": {0: "n"}, "y": {0: "n"}}, (A, A), {}, [(A, 0), (A, 0)]),
    ],
)
def test_a_call_is_bound_to_the_signature(
    spec: Any, args: Any, kwargs: Any, expected: list[tuple[Tensor, int]]
) -> None:
    pairs = DynamicArgs.of(declared, spec).bind(args, kwargs)
    assert [(id(t), d) for t, d in pairs] == [(id(t), d) for t, d in expected]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_out_of_range_is_an_error(dim: int) -> None:
    with pytest.raises(OpValueError, match="which has 2 dims"):
        DynamicArgs.of(declared, {"x": dim}).bind((A,), {})


def test_a_target_that_is_no_tensor_is_an_error() -> None:
    with pytest.raises(OpTypeError, match="x of declared is int, not a tensor"):
        DynamicArgs.of(declared, {"x": 0}).bind((3,), {})


def test_an_unknown_argument_is_an_error_with_the_nearest() -> None:
    with pytest.raises(OpTypeError, match="Did you mean 'residual'"):
        DynamicArgs.of(lambda x, residual: x, {"residul": 0})
    with pytest.raises(OpTypeError, match="does not have"):

        @CustomOp.register("wrong_dims", dynamic_arg_dims={"z": 0})
        class Op(CustomOp):
            def forward_native(self, x: Tensor) -> Tensor:
                return x


@pytest.mark.parametrize("dims", [True, "0", 1.5, ["0"], {0: 1}, None])
def test_a_malformed_dim_is_an_error(dims: Any) -> None:
    with pytest.raises(OpTypeError, match="Dims are integers"):
        DynamicArgs.of(declared, {"x": dims})


def test_two_sizes_under_one_name_fail_before_compiling(counted: list[Any]) -> None:
    fn = maybe_compile(
        lambda x, residual: x, dynamic_arg_dims={"x": {0: "tokens"}, "residual": {0: "tokens"}}
    )
    with pytest.raises(OpValueError, match=r"two sizes of 'tokens': x.size\(0\) is 2, residual"):
        fn(A, B)
    assert counted == []


# Ops


def test_a_copy_of_a_compiled_op_uses_its_own_weights(counted: list[Any]) -> None:
    @CustomOp.register("compiled_for_tests", dynamic_arg_dims={"x": 0})
    class Op(CustomOp):
        def __init__(self) -> None:
            super().__init__(compile_native=True)
            self.weight = nn.Parameter(torch.full((4,), 2.0))

        def forward_native(self, x: Tensor) -> Tensor:
            return x * self.weight

    op = Op()
    assert op.decision.compile_backend == BACKEND
    x = torch.ones(3, 4)
    assert op(x).tolist() == [[2.0] * 4] * 3
    twin = copy.deepcopy(op)
    with torch.no_grad():
        twin.weight.zero_()
    assert twin(x).tolist() == [[0.0] * 4] * 3
    assert op(torch.ones(5, 4)).sum() == 40
    assert counted


def test_graph_partition_is_off_for_inductor_only() -> None:
    assert maybe_disable_graph_partition("inductor") == {"options": {"graph_partition": False}}
    assert maybe_disable_graph_partition("aot_eager") == {}


@pytest.mark.slow
def test_inductor_takes_the_options() -> None:
    with use_platform("cpu"), use_config(CompilationConfig()):
        fn = maybe_compile(lambda x: x * 2 + 1, dynamic_arg_dims={"x": 0})
        for rows in (3, 5):
            assert fn(torch.ones(rows, 4)).sum() == rows * 4 * 3
