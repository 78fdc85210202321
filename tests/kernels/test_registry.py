"""Which provider runs: by priority, by ``supports``, by what loads; and that the ops trace."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from compilepass import kernels
from compilepass.errors import RegistrationError
from compilepass.reporting import notes

EPS = 1e-6
_names = (f"kernels_test::op{i}" for i in itertools.count())


@pytest.fixture
def op() -> kernels.KernelOp:
    """A new op, native ``x + 1``: what is registered for it concerns no other test."""
    return _define(next(_names))


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def plus(by: int) -> Any:
    return lambda x: x + by


def _define(name: str) -> kernels.KernelOp:
    return kernels.define(f"{name}(Tensor x) -> Tensor", native=plus_one)


def provide(op: kernels.KernelOp, name: str, by: int, **options: Any) -> None:
    kernels.provider(op.name, name=name, device_type="cpu", load=lambda: plus(by), **options)


def run(op: kernels.KernelOp, x: Tensor | None = None) -> float:
    return float(op.overload(torch.zeros(1) if x is None else x).flatten()[0])


def test_native_runs_where_no_provider_is(op: kernels.KernelOp) -> None:
    assert run(op) == 1
    assert op.available("cpu") == kernels.Availability(
        False, None, "no kernel is registered for cpu"
    )
    assert op.supports("cpu", torch.zeros(1)) == "no kernel is registered for cpu"


def test_the_highest_priority_runs(op: kernels.KernelOp) -> None:
    provide(op, "low", 10)
    provide(op, "high", 20, priority=1)
    assert run(op) == 20
    assert op.available("cpu") == kernels.Availability(True, "high", "")
    assert [p.name for p in op.providers] == ["high", "low"]


def test_a_provider_may_come_after_the_first_call(op: kernels.KernelOp) -> None:
    assert run(op) == 1
    provide(op, "low", 10)
    assert run(op) == 10
    provide(op, "high", 20, priority=1)
    assert run(op) == 20


def test_a_declined_call_goes_to_the_next_provider_and_at_last_to_native(
    op: kernels.KernelOp,
) -> None:
    def only(rank: int) -> Any:
        return lambda x: None if x.dim() == rank else f"rank {x.dim()}"

    provide(op, "matrices", 20, priority=2, supports=only(2))
    provide(op, "cubes", 30, priority=1, supports=only(3))
    assert [run(op, torch.zeros([1] * rank)) for rank in (1, 2, 3)] == [1, 20, 30]
    assert op.supports("cpu", torch.zeros(1, 1)) is None
    assert op.supports("cpu", torch.zeros(1)) == "matrices: rank 1; cubes: rank 1"


def test_a_self_registered_kernel_is_next_choice_below_one_that_declines(
    op: kernels.KernelOp,
) -> None:
    namespace, _, short = op.name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    loads = []

    def load() -> None:
        loads.append(1)
        library.impl(short, plus(10), "CPU")

    kernels.provider(op.name, name="own", device_type="cpu", load=load)
    assert run(op) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        provide(op, "picky", 20, priority=1, supports=lambda x: None if x.dim() == 2 else "rank")
    assert [run(op, torch.zeros([1] * rank)) for rank in (1, 2)] == [10, 20]
    assert len(loads) == 1


def test_a_provider_that_fails_to_load_is_told_and_passed_over(op: kernels.KernelOp) -> None:
    def broken() -> Any:
        raise ImportError("no such library")

    kernels.provider(op.name, name="broken", device_type="cpu", priority=1, load=broken)
    assert run(op) == 1
    assert "no such library" in op.available("cpu").reason
    assert any("no such library" in note.message for note in notes())
    provide(op, "sound", 10)
    assert run(op) == 10


def test_a_provider_that_registers_nothing_is_told(op: kernels.KernelOp) -> None:
    kernels.provider(op.name, name="idle", device_type="cpu", load=lambda: None)
    assert run(op) == 1
    assert "registered no kernel" in op.available("cpu").reason


def test_an_unavailable_provider_is_not_loaded(op: kernels.KernelOp) -> None:
    def never() -> Any:
        raise AssertionError("loaded")

    kernels.provider(
        op.name, name="other", device_type="cpu", load=never, available=lambda: "needs a TPU"
    )
    assert run(op) == 1
    assert op.available("cpu").reason == "other: needs a TPU"


def test_a_second_definition_is_refused_and_the_same_one_replaces(op: kernels.KernelOp) -> None:
    assert _define(op.name).overload is op.overload
    with pytest.raises(RegistrationError, match="defined twice"):
        kernels.define(f"{op.name}(Tensor x) -> Tensor", native=plus(3))
    with pytest.raises(RegistrationError, match="defined twice"):
        kernels.define(f"{op.name}(Tensor x, int y) -> Tensor", native=plus_one)


@pytest.mark.parametrize(
    "schema", ["bare(Tensor x) -> Tensor", "a b::c(Tensor x) -> Tensor", "kernels_test::bad("]
)
def test_a_malformed_schema_is_refused(schema: str) -> None:
    with pytest.raises(RegistrationError):
        kernels.define(schema, native=plus_one)


def test_a_provider_of_an_unknown_op_is_refused_with_the_nearest() -> None:
    with pytest.raises(RegistrationError, match="Did you mean 'compilepass::rms_norm'"):
        kernels.provider("compilepass::rmsnorm", name="x", device_type="cpu", load=lambda: plus_one)


def test_a_second_provider_of_one_name_is_refused(op: kernels.KernelOp) -> None:
    provide(op, "one", 10)
    with pytest.raises(RegistrationError, match="'one'"):
        provide(op, "one", 20)


def test_ops_are_found_by_name_and_graph_target_and_survive_copies() -> None:
    op = kernels.find("compilepass::rms_norm")
    assert op is not None
    assert kernels.find(torch.ops.compilepass.rms_norm.default) is op
    assert kernels.find(torch.ops.aten.add.Tensor) is None
    assert kernels.find(torch.add) is None
    assert copy.deepcopy(op) is op
    assert pickle.loads(pickle.dumps(op)) is op
    assert op.mutates == ()


def test_what_an_op_writes_to_is_read_from_its_schema() -> None:
    op = kernels.define(
        f"{next(_names)}(Tensor(a!) x, Tensor y) -> ()", native=lambda x, y: x.copy_(y) and None
    )
    assert op.mutates == ("x",)


def test_many_threads_may_call_first(op: kernels.KernelOp) -> None:
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return plus(10)

    kernels.provider(op.name, name="slow", device_type="cpu", load=load)
    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(run(op))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [10] * 8
    assert len(loads) == 1


def test_every_shipped_op_has_a_cpu_kernel() -> None:
    kernels.ensure_loaded("cpu")
    assert [op.name for op in kernels.SHIPPED if not op.available("cpu").ok] == []


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)


def test_an_op_stays_one_node_in_a_traced_graph() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.compilepass.rms_norm(x, weight, EPS) * 2

    graph = make_fx(function, tracing_mode="symbolic")(torch.randn(3, 8), torch.randn(8))
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.compilepass.rms_norm.default) == 1
    assert torch.ops.aten.rsqrt.default not in called


def test_eps_may_be_symbolic() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    norm = compiled(lambda x, weight, eps: torch.ops.compilepass.rms_norm(x, weight, eps) * 2)
    for eps in (1e-6, 1.0, 1e-2):
        wanted = torch.ops.compilepass.rms_norm(x, weight, eps) * 2
        assert torch.equal(norm(x, weight, eps), wanted)


@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")
def test_gradients_are_natives_eager_and_compiled() -> None:
    def gradient(function: Any) -> Tensor:
        x, weight = torch.arange(24.0).reshape(3, 8).requires_grad_(), torch.linspace(1, 2, 8)
        function(x, weight, EPS).sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = gradient(kernels.native.rms_norm)
    assert torch.equal(gradient(torch.ops.compilepass.rms_norm), wanted)
    in_a_graph = gradient(compiled(lambda *args: torch.ops.compilepass.rms_norm(*args)))
    torch.testing.assert_close(in_a_graph, wanted)


@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")
@pytest.mark.parametrize("leaf", [True, False])
def test_a_kernel_notices_that_any_argument_needs_a_gradient(leaf: bool) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    out = torch.ops.compilepass.rms_norm(x, weight if leaf else weight * 1, EPS)
    assert out.requires_grad
    out.sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not torch.ops.compilepass.rms_norm(x, weight, EPS).requires_grad


@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")
@pytest.mark.parametrize("supports", [None, lambda x: None], ids=["always", "chosen"])
def test_a_kernel_in_python_is_not_asked_for_a_gradient(
    op: kernels.KernelOp, supports: Any
) -> None:
    provide(op, "ten", 10, supports=supports)
    leaf = torch.zeros(1, requires_grad=True)
    out = op.overload(leaf)
    assert torch.equal(out, torch.ones(1))
    out.backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.ones(1))
    with torch.no_grad():
        assert run(op, leaf) == 10


def test_needs_grad() -> None:
    x, leaf = torch.randn(2), torch.randn(2, requires_grad=True)
    assert kernels.needs_grad(x, None, leaf)
    assert not kernels.needs_grad(x, None)
    with torch.no_grad():
        assert not kernels.needs_grad(leaf)


def test_compiled_by_inductor_it_computes_what_eager_does() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)

    def function(x: Tensor) -> Tensor:
        normed, total = torch.ops.compilepass.fused_add_rms_norm(x.relu(), x, weight, EPS)
        return normed.sigmoid() + total

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function)(x), function(x))
