"""``cp.compile`` and ``cp.backend``: what runs, what is counted, and what is an error."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import compilepass as cp
from compilepass import ConfigError, ExpectationError
from compilepass.errors import PassError, PlanError

from .models import WIDTH, AddNorm, Broken, Chain, built, fx_config, inputs

ATOL = 1e-5


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=ATOL, rtol=ATOL)


# Counting


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_module_is_compiled_with_the_passes(fullgraph: bool) -> None:
    model, args = built(AddNorm), inputs()
    fast = cp.compile(model, fx_config(), fullgraph=fullgraph)
    close(fast(*args), model(*args))
    found = cp.report(fast)
    assert found.matches["fuse_add_rms_norm"] == 1
    assert [g.name for g in found.graphs] == ["graph 0"]
    assert [(o.name, o.state, o.count) for o in found.ops] == [("rms_norm", "disabled", 1)]
    assert not found.from_cache


def test_a_function_is_compiled_with_the_passes() -> None:
    model, args = built(AddNorm), inputs()

    def step(x: Tensor, residual: Tensor) -> Tensor:
        """One step."""
        return model(x, residual) * 2  # type: ignore[no-any-return]

    fast = cp.compile(step, fx_config(expect={"fuse_add_rms_norm": 1}))
    close(fast(*args), step(*args))
    assert cp.report(fast).matches["fuse_add_rms_norm"] == 1
    assert (fast.__name__, fast.__doc__) == ("step", "One step.")


def test_a_model_on_the_meta_device_is_compiled() -> None:
    """It has no autocast, and PyTorch raises where it is asked about it."""
    fast = cp.compile(lambda x: torch.relu(x) * 2, cp.CompilationConfig(backend="fx"))
    with torch.no_grad():
        assert fast(torch.empty(4, 8, device="meta")).shape == (4, 8)


def test_graph_breaks_make_a_record_each_and_are_summed() -> None:
    model, args = built(Broken), inputs()
    fast = cp.compile(model, fx_config(expect={"fuse_add_rms_norm": 3}))
    close(fast(*args), model(*args))
    found = cp.report(fast)
    assert [g.name for g in found.graphs] == ["graph 0", "graph 1", "graph 2"]
    assert found.matches["fuse_add_rms_norm"] == 3


def test_a_recompile_does_not_count_twice() -> None:
    model = built(Chain, 2)
    fast = cp.compile(model, fx_config())
    for rows in (4, 6, 9):
        args = inputs(rows)
        close(fast(*args), model(*args))
    found = cp.report(fast)
    assert len(found.graphs) == 1
    assert found.matches["fuse_add_rms_norm"] == 2


def test_two_models_of_one_class_on_one_backend_are_summed() -> None:
    """They are one code object, and one frame to Dynamo."""
    backend = cp.backend(fx_config())
    for width in (16, 32):
        torch.compile(built(AddNorm, width), backend=backend)(*inputs(width=width))
    torch.compile(built(Chain, 2), backend=backend)(*inputs())
    assert cp.report(backend).matches["fuse_add_rms_norm"] == 4
    assert [g.name for g in cp.report(backend).graphs] == ["graph 0", "graph 1", "graph 2"]


def test_after_a_reset_of_dynamo_models_are_told_apart_and_not_counted_twice() -> None:
    backend = cp.backend(fx_config())
    first, second = built(Broken), built(Chain, 2)
    fast, faster = torch.compile(first, backend=backend), torch.compile(second, backend=backend)
    fast(*inputs())
    torch._dynamo.reset()
    faster(*inputs())  # Dynamo counts from zero again
    assert cp.report(backend).matches["fuse_add_rms_norm"] == 5
    torch._dynamo.reset()
    faster(*inputs())
    fast(*inputs())
    assert cp.report(backend).matches["fuse_add_rms_norm"] == 5
    assert [g.name for g in cp.report(backend).graphs] == [f"graph {i}" for i in range(4)]


def test_threads_with_configs_of_their_own_stay_apart() -> None:
    """Each decides its ops under its own config, compiles, and reads its own report."""
    found: dict[int, Any] = {}
    barrier = threading.Barrier(2)

    def work(length: int) -> None:
        on = length == 2
        config = fx_config(passes=["default"] if on else ["default", "-fuse_add_rms_norm"])
        with cp.use_config(config):
            model = Chain(length).eval().requires_grad_(False)
            barrier.wait()
            fast = cp.compile(model)
            for rows in (4, 7):
                args = inputs(rows)
                close(fast(*args), model(*args))
        report = cp.report(fast)
        found[length] = report.matches.get("fuse_add_rms_norm"), report.ops[0].count

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: (2, 2), 3: (None, 3)}


# Expectations


def test_what_is_expected_passes_in_silence() -> None:
    fast = cp.compile(built(Chain, 2), fx_config(expect={"fuse_add_rms_norm": 2}))
    fast(*inputs())
    fast(*inputs(7))


def test_too_few_matches_are_an_error_with_the_near_miss() -> None:
    class Shares(AddNorm):
        def forward(self, x: Tensor, residual: Tensor) -> Any:
            total = x + residual
            inverse = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.norm.weight * (total * inverse), inverse

    fast = cp.compile(built(Shares), fx_config(expect={"fuse_add_rms_norm": 1}))
    with pytest.raises(ExpectationError) as error:
        fast(*inputs())
    assert error.value.what == "Pass 'fuse_add_rms_norm' matched 0 times, and expect says 1."
    near = [n for n in cp.report(fast).near_misses if n.pass_name == "fuse_add_rms_norm"]
    assert near[0].code == "extra_user"
    assert error.value.why == "\n".join(map(str, near))
    fast(*inputs())  # told once


def test_too_many_matches_are_an_error_while_compiling() -> None:
    fast = cp.compile(built(Chain, 2), fx_config(expect={"fuse_add_rms_norm": 1}))
    with pytest.raises(ExpectationError, match="matched 2 times, and expect says 1"):
        fast(*inputs())


def test_expecting_none_is_an_expectation_too() -> None:
    fast = cp.compile(built(AddNorm), fx_config(expect={"fuse_add_rms_norm": 0}))
    with pytest.raises(ExpectationError, match="matched 1 time, and expect says 0"):
        fast(*inputs())


def test_expecting_an_unknown_pass_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="'fuse_add_rmsnorm'") as error:
        cp.compile(built(AddNorm), fx_config(expect={"fuse_add_rmsnorm": 1}))
    assert "'fuse_add_rms_norm'" in error.value.hint


def test_strict_wants_a_match_of_each_pass_that_was_asked_for() -> None:
    words = ["default", "+fuse_norm_quant"]
    fast = cp.compile(built(AddNorm), fx_config(strict=True, passes=words))
    with pytest.raises(ExpectationError, match="'fuse_norm_quant' matched 0 times") as error:
        fast(*inputs())
    assert "strict=True and it was asked for by name" in error.value.what
    fine = cp.compile(built(AddNorm), fx_config(strict=True, passes=["+fuse_add_rms_norm"]))
    fine(*inputs())


def test_a_bare_backend_checks_when_it_is_asked() -> None:
    backend = cp.backend(fx_config(expect={"fuse_add_rms_norm": 2}))
    torch.compile(built(AddNorm), backend=backend)(*inputs())
    with pytest.raises(ExpectationError, match="matched 1 time, and expect says 2"):
        backend.check()


def test_nothing_remains_of_the_check_after_the_first_call() -> None:
    plain = cp.compile(built(AddNorm), fx_config())
    checked = cp.compile(built(AddNorm), fx_config(expect={"fuse_add_rms_norm": 1}))
    assert checked.forward.__qualname__ != plain.forward.__qualname__
    checked(*inputs())
    assert checked.forward.__qualname__ == plain.forward.__qualname__


# Failing passes


class Breaks(cp.Pass):
    name = "breaks"

    def run(self, graph: Graph, ctx: cp.PassContext) -> int:
        graph.output_node().args = ((),)
        raise RuntimeError("torn down")


def test_a_model_compiles_with_a_pass_that_raises_and_the_report_says_why() -> None:
    config = fx_config()
    config.register_pass(Breaks, before=["fuse_add_rms_norm"])
    model, args = built(AddNorm), inputs()
    fast = cp.compile(model, config)
    close(fast(*args), model(*args))
    found = cp.report(fast)
    failed = next(p for p in found.passes if p.name == "breaks")
    assert (failed.status, failed.reason) == ("failed", "RuntimeError: torn down")
    assert found.matches["fuse_add_rms_norm"] == 1
    assert "torn down" in str(found)


def test_strict_shows_the_error_of_a_pass() -> None:
    config = fx_config(strict=True)
    config.register_pass(Breaks)
    with pytest.raises(PassError, match="Pass 'breaks' raised RuntimeError: torn down"):
        cp.compile(built(AddNorm), config)(*inputs())


# Modes


def test_mode_none_returns_the_model() -> None:
    model = built(AddNorm)
    assert cp.compile(model, fx_config(mode="none")) is model


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fx"])
def test_stock_compiles_without_passes_on_any_backend(backend: str) -> None:
    config = cp.CompilationConfig(mode="stock_torch_compile", backend=backend)
    model, args = built(AddNorm), inputs()
    fast = cp.compile(model, config)
    close(fast(*args), model(*args))
    with pytest.raises(ConfigError, match="no report on OptimizedModule"):
        cp.report(fast)


def test_another_backend_with_passes_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend='eager' runs no passes") as error:
        cp.compile(built(AddNorm), cp.CompilationConfig(backend="eager"))
    assert "STOCK_TORCH_COMPILE" in error.value.hint


@pytest.mark.parametrize("mode", ["stock_torch_compile", "compile_with_passes"])
def test_an_unknown_option_of_inductor_is_refused_at_once(mode: str) -> None:
    config = cp.CompilationConfig(mode=mode, inductor_options={"max_autotun": True})
    with pytest.raises(ConfigError, match="'max_autotun'") as error:
        cp.compile(built(AddNorm), config)
    assert "'max_autotune'" in error.value.hint


def test_options_of_the_call_are_fields_of_the_config() -> None:
    fast = cp.compile(built(AddNorm), fx_config(), passes=["none"])
    fast(*inputs())
    assert cp.report(fast).matches == {}
    with pytest.raises(ConfigError, match="unknown field 'pases'"):
        cp.compile(built(AddNorm), fx_config(), pases=["none"])


def test_a_plan_that_cannot_be_made_is_refused_at_once() -> None:
    config = fx_config()
    config.register_pass(17)
    with pytest.raises(PlanError):
        cp.backend(config)


# Reports


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)), len, 5, "x"])
def test_a_report_on_something_else_is_an_error(thing: Any) -> None:
    with pytest.raises(ConfigError, match=f"no report on {type(thing).__name__}"):
        cp.report(thing)


def test_torch_compile_with_our_backend_can_be_asked_too() -> None:
    fast = torch.compile(built(AddNorm), backend=cp.backend(fx_config()))
    fast(*inputs())
    assert cp.report(fast).matches["fuse_add_rms_norm"] == 1


def test_model_compile_keeps_the_state_dict() -> None:
    model, args = built(AddNorm), inputs()
    keys, wanted = list(model.state_dict()), model(*args)
    backend = cp.backend(fx_config())
    model.compile(backend=backend)
    close(model(*args), wanted)
    assert list(model.state_dict()) == keys
    assert cp.report(backend).matches["fuse_add_rms_norm"] == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_compiled_model_works_with_its_own_weights(copied: Any, when: str) -> None:
    fast = cp.compile(built(AddNorm), fx_config(expect={"fuse_add_rms_norm": 1}))
    args = inputs()
    if when == "after":
        fast(*args)
    other = copied(fast)
    with torch.no_grad():
        other.linear.weight.zero_()
        other.linear.bias.fill_(3.0)
    close(other(*args), args[0] + args[1] + 3.0)
    close(fast(*args), fast._orig_mod(*args))
    for model in (fast, other):
        assert cp.report(model).matches["fuse_add_rms_norm"] == 1
    if copied is copy.deepcopy:
        assert [op.name for op in cp.report(other).ops] == ["rms_norm"]


# Numbers


class Eps(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(WIDTH)), eps

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = x + residual
        variance = total.pow(2).mean(-1, keepdim=True)
        return self.weight * (total * torch.rsqrt(variance + self.eps))


def test_float_attributes_stay_literals_under_dynamic_shapes_and_are_guarded() -> None:
    model = built(Eps, 1e-6)
    fast = cp.compile(model, fx_config(dynamic=True))
    for rows, eps in ((4, 1e-6), (6, 1e-6), (6, 0.5), (9, 1e-6)):
        model.eps = eps
        args = inputs(rows)
        close(fast(*args), model(*args))
        assert cp.report(fast).matches["fuse_add_rms_norm"] == 1


def test_float_arguments_stay_dynamic_and_near_misses_say_so() -> None:
    weight = torch.randn(WIDTH)
    compiles = []

    def norm(x: Tensor, residual: Tensor, eps: float) -> Tensor:
        compiles.append(eps) if torch.compiler.is_dynamo_compiling() else None
        total = x + residual
        return weight * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps))

    fast = cp.compile(norm, fx_config(dynamic=True))
    for eps in (1e-6, 0.25, 0.75):
        args = inputs()
        close(fast(*args, eps), norm(*args, eps))
    found = cp.report(fast)
    assert found.matches["fuse_add_rms_norm"] == 0
    assert {n.code for n in found.near_misses if n.pass_name == "fuse_add_rms_norm"} == {"scalar"}


# Training


def test_training_graphs_are_left_alone_and_gradients_equal_stock() -> None:
    args = inputs()
    model = built(Chain, 2).train().requires_grad_(True)
    stock = copy.deepcopy(model)
    fast = cp.compile(model, fx_config())
    fast(*args).sum().backward()
    stock(*args).sum().backward()
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        close(mine.grad, theirs.grad)
    found = cp.report(fast)
    assert [(g.name, g.is_backward) for g in found.graphs] == [
        ("graph 0", False),
        ("graph 0 backward", True),
    ]
    for graph in found.graphs:
        (fusion,) = [p for p in graph.passes if p.name == "fuse_add_rms_norm"]
        assert (fusion.status, fusion.reason) == ("skipped", "the graph has a backward pass")
    assert "fuse_add_rms_norm" not in found.matches


def test_the_bodies_of_higher_order_operations_are_graphs_too() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = AddNorm(), AddNorm()

        def forward(self, x: Tensor, residual: Tensor) -> Any:
            return torch.cond(x.sum() > 0, self.first, self.second, (x, residual))

    model = built(Choice)
    fast = cp.compile(model, fx_config())
    for sign in (1, -1):
        x, residual = inputs()
        close(fast(sign * x.abs(), residual), model(sign * x.abs(), residual))
    found = cp.report(fast)
    assert sorted(g.name for g in found.graphs) == [
        "graph 0",
        "graph 0 false_graph_0",
        "graph 0 true_graph_0",
    ]
    assert found.matches["fuse_add_rms_norm"] == 2
