"""A configuration names the provider of a kernel, for what is built and compiled under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass import kernels
from compilepass.errors import ConfigError
from compilepass.kernels.listing import listed

OP = "preference_test::add_one"
ABSENT = "it is somewhere else"


def _op() -> kernels.KernelOp:
    """An op whose result says which provider ran."""
    known = kernels.find(OP)
    if known is not None:
        return known
    made = kernels.define(f"{OP}(Tensor x) -> Tensor", native=lambda x: x + 1)

    def register(name: str, adds: int, **options: object) -> None:
        options = {"device_type": "cpu", **options}
        kernels.provider(OP, name=name, load=lambda: lambda x: x + adds, **options)  # type: ignore[arg-type]

    register("first", 10, priority=2)
    register("second", 20, priority=1)
    register("odd", 30, supports=lambda x: None if x.shape[0] % 2 else "the rows are even")
    register("missing", 40, available=lambda: ABSENT)
    return made


@pytest.fixture
def op() -> kernels.KernelOp:
    return _op()


def added(rows: int = 3) -> float:
    result: Tensor = _op().overload(torch.zeros(rows, 2))
    return float(result[0, 0])


@pytest.mark.parametrize(
    ("name", "adds"), [("first", 10), ("second", 20), ("odd", 30), ("native", 1), ("missing", 10)]
)
def test_a_call_runs_the_provider_that_is_preferred_where_it_can(
    op: kernels.KernelOp, name: str, adds: float
) -> None:
    with kernels.prefer({op.name: name}):
        assert added() == adds
    assert added() == 10


def test_what_the_preferred_provider_declines_goes_by_priority(op: kernels.KernelOp) -> None:
    with kernels.prefer({op.name: "odd"}):
        assert (added(3), added(4)) == (30, 10)


def test_two_models_compiled_under_two_configs_stay_apart(op: kernels.KernelOp) -> None:
    def model(x: Tensor) -> Tensor:
        return op.overload(x)  # type: ignore[no-any-return]

    made: dict[str, Any] = {}
    for name in ("second", "native"):
        config = cp.CompilationConfig(backend="fx", kernel_providers={op.name: name})
        made[name] = cp.compile(lambda x: model(x) * 1, config)
    x = torch.zeros(3, 2)
    with torch.no_grad():
        results = {name: float(fast(x)[0, 0]) for name, fast in made.items()}
        assert results == {"second": 20, "native": 1}
        assert {name: float(fast(x)[0, 0]) for name, fast in made.items()} == results
    assert "runs second on cpu" in str(cp.report(made["second"]))


class PreferenceOp(cp.CustomOp):
    def forward_native(self, x: Tensor) -> Tensor:
        return x

    def forward_cpu(self, x: Tensor) -> Tensor:
        return _op().overload(x)  # type: ignore[no-any-return]


def test_a_custom_op_keeps_the_preference_of_the_config_that_it_was_built_under(
    op: kernels.KernelOp,
) -> None:
    config = cp.CompilationConfig(custom_ops=["all"], kernel_providers={op.name: "second"})
    with cp.use_config(config), cp.use_platform("cpu"):
        preferring = PreferenceOp()
    with cp.use_config(cp.CompilationConfig(custom_ops=["all"])), cp.use_platform("cpu"):
        usual = PreferenceOp()
    x = torch.zeros(3, 2)
    assert (float(preferring(x)[0, 0]), float(usual(x)[0, 0])) == (20, 10)
    assert f"preferring second for {op.name}" in str(cp.describe(preferring))


def test_the_listing_says_what_is_preferred(op: kernels.KernelOp) -> None:
    def states(name: str) -> dict[str, str]:
        config = cp.CompilationConfig(kernel_providers={op.name: name})
        with cp.use_config(config):
            return {row.provider: row.state for row in listed(op)}

    assert states("second") == {
        "second": "runs", "first": "next", "odd": "idle", "missing": "absent"
    }  # fmt: skip
    assert states("native")["native"] == "runs"
    assert states("missing") == {
        "first": "runs", "second": "idle", "odd": "idle", "missing": "absent"
    }  # fmt: skip


def test_a_kernel_or_provider_that_does_not_exist_is_an_error_with_the_nearest_name(
    op: kernels.KernelOp,
) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'rms_norm'"):
        kernels.prefer({"rms_nrm": "cpp"})
    with pytest.raises(ConfigError, match="Did you mean 'first'"):
        kernels.prefer({op.name: "frist"})


def test_native_can_be_preferred_to_the_kernel_in_cpp() -> None:
    x, weight = torch.randn(2, 64), torch.randn(64)
    with kernels.prefer({"rms_norm": "native"}):
        preferred = torch.ops.compilepass.rms_norm(x, weight, 1e-6)
    assert torch.equal(preferred, kernels.native.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(torch.ops.compilepass.rms_norm(x, weight, 1e-6), preferred)
