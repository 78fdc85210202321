"""Out-of-tree classes replace in-tree ones, for good or for a scope."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from compilepass.config import CompilationConfig, use_config
from compilepass.errors import OpTypeError, RegistrationError
from compilepass.ops import (
    CustomOp,
    PluggableLayer,
    describe,
    hw_agnostic,
    op_registry,
    op_registry_oot,
    override,
    unmatched_overrides,
)
from compilepass.platforms import use_platform


@pytest.fixture
def norm() -> type[Any]:
    @CustomOp.register("norm_for_tests")
    class Norm(CustomOp):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def forward_native(self, x: Any) -> str:
            return "native"

    return Norm


def spell_bare(cls: type[Any], mine: type[Any]) -> None:
    cls.register_oot(mine)


def spell_called(cls: type[Any], mine: type[Any]) -> None:
    cls.register_oot()(mine)


def spell_named(cls: type[Any], mine: type[Any]) -> None:
    root = CustomOp if issubclass(cls, CustomOp) else PluggableLayer
    root.register_oot(name=cls.__name__)(mine)


@pytest.mark.parametrize("spell", [spell_bare, spell_called, spell_named])
def test_three_spellings_replace_the_class_when_it_is_built(norm: type[Any], spell: Any) -> None:
    class Mine(norm):  # type: ignore[misc]
        def forward_oot(self, x: Any) -> str:
            return "mine"

    spell(norm, Mine)
    assert op_registry_oot["Norm"] is Mine
    with use_config(CompilationConfig(custom_ops="none,+norm_for_tests")), use_platform("cpu"):
        op = norm(7)
        assert "built as" in str(describe(norm))
    assert type(op) is Mine
    assert op.size == 7
    assert op("x") == "mine"
    assert unmatched_overrides() == []


def test_a_replacement_that_is_no_subclass_is_built_and_follows_the_word(norm: type[Any]) -> None:
    @norm.register_oot
    class Mine(CustomOp):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.mine = size

        def forward_native(self, x: Any) -> str:
            return "mine"

    with use_config(CompilationConfig(custom_ops="none,+norm_for_tests")):
        op = norm(7)
    assert (type(op), op.mine, op.decision.name, op.decision.enabled) == (
        Mine,
        7,
        "norm_for_tests",
        True,
    )


def fail_unless(holds: bool) -> None:
    assert holds
    raise ZeroDivisionError


def test_override_is_undone_also_after_an_error(norm: type[Any]) -> None:
    class Mine(norm):  # type: ignore[misc]
        pass

    class Inner(norm):  # type: ignore[misc]
        pass

    with override(norm, Mine):
        assert type(norm(1)) is Mine
        with pytest.raises(ZeroDivisionError), override(norm, Inner):
            fail_unless(type(norm(1)) is Inner)
        assert type(norm(1)) is Mine
    assert type(norm(1)) is norm
    assert "Norm" not in op_registry_oot


@pytest.mark.parametrize("wrong", [3, "Mine", nn.Linear, PluggableLayer])
def test_what_cannot_replace_an_op_is_a_type_error(norm: type[Any], wrong: Any) -> None:
    with pytest.raises(OpTypeError), override(norm, wrong):
        pass
    with pytest.raises(OpTypeError):
        norm.register_oot(wrong)
    with pytest.raises(OpTypeError), override(wrong, norm):
        pass


def test_register_oot_needs_to_know_what_is_replaced(norm: type[Any]) -> None:
    with pytest.raises(RegistrationError, match="does not say which class"):
        CustomOp.register_oot(norm)
    with pytest.raises(OpTypeError):
        CustomOp.register_oot(name=3)  # type: ignore[arg-type]


def test_two_replacements_of_one_class_are_an_error_that_names_both(norm: type[Any]) -> None:
    @norm.register_oot
    class First(norm):  # type: ignore[misc]
        pass

    with pytest.raises(RegistrationError, match=r"Second.*\n.*First"):

        @norm.register_oot
        class Second(norm):  # type: ignore[misc]
            pass


def test_an_override_that_matches_no_class_is_reported(norm: type[Any]) -> None:
    @CustomOp.register_oot(name="NoSuchClass")
    class Mine(norm):  # type: ignore[misc]
        pass

    assert unmatched_overrides() == ["NoSuchClass"]


# Pluggable layers


def layer() -> type[Any]:
    @PluggableLayer.register("mla_for_tests")
    class Attention(PluggableLayer):
        def __init__(self, heads: int, scale: float = 1.0, *, bias: bool = False) -> None:
            super().__init__()
            self.proj = nn.Linear(heads, heads, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x)  # type: ignore[no-any-return]

    return Attention


@pytest.mark.parametrize("spell", [spell_bare, spell_called, spell_named])
def test_a_layer_is_replaced_with_its_parameters(spell: Any) -> None:
    attention = layer()

    class Mine(attention):  # type: ignore[misc]
        def __init__(
            self, heads: int, scale: float = 1.0, *, bias: bool = False, extra: int = 3
        ) -> None:
            super().__init__(heads, scale, bias=bias)
            self.extra = extra

    spell(attention, Mine)
    built = attention(4, bias=True)
    assert type(built) is Mine
    assert list(built.state_dict()) == ["proj.weight", "proj.bias"]
    assert op_registry["mla_for_tests"] is attention


def init_missing(self: Any, heads: int, *, bias: bool = False) -> None: ...
def init_kind(self: Any, heads: int, scale: float = 1.0, bias: bool = False) -> None: ...
def init_required(
    self: Any, heads: int, scale: float = 1.0, *, bias: bool = False, n: int
) -> None: ...
def init_default(self: Any, heads: int, scale: float, *, bias: bool = False) -> None: ...
def init_order(self: Any, scale: float = 1.0, heads: int = 1, *, bias: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("init", "parameter"),
    [
        (init_missing, "no parameter 'scale'"),
        (init_kind, "'bias' is positional or keyword, not keyword-only"),
        (init_required, "'n' is required"),
        (init_default, "'scale' has no default"),
        (init_order, "'scale' stands where 'heads' is"),
    ],
)
def test_another_constructor_is_an_error_with_both_classes_and_the_parameter(
    init: Any, parameter: str
) -> None:
    attention = layer()
    mine = type("Mine", (attention,), {"__init__": init})
    with pytest.raises(OpTypeError) as caught:
        attention.register_oot(mine)
    assert parameter in str(caught.value)
    assert "Mine cannot replace" in str(caught.value)
    assert "Attention" in str(caught.value)
    PluggableLayer.register_oot(name="Attention")(mine)  # the class is not known yet: judged later
    with pytest.raises(OpTypeError):
        attention(4)


def test_a_constructor_that_passes_everything_on_is_fine() -> None:
    attention = layer()

    @attention.register_oot
    class Mine(attention):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    assert type(attention(4)) is Mine


# The hardware-agnostic path


@pytest.fixture
def agnostic() -> type[Any]:
    @hw_agnostic.CustomOp.register("norm_for_tests")
    class Norm(hw_agnostic.CustomOp):
        def forward_native(self, x: Any) -> str:
            return "native"

    return Norm


def test_the_agnostic_path_has_registries_of_its_own(norm: type[Any], agnostic: type[Any]) -> None:
    assert hw_agnostic.op_registry["norm_for_tests"] is agnostic
    assert op_registry["norm_for_tests"] is norm

    @agnostic.register_oot
    class Mine(agnostic):  # type: ignore[misc]
        def forward_oot(self, x: Any) -> str:
            return "mine"

    assert hw_agnostic.op_registry_oot["Norm"] is Mine
    assert "Norm" not in op_registry_oot
    for words, result in (("all", "mine"), ("none", "native")):
        with use_config(CompilationConfig(custom_ops=words)), use_platform("cuda"):
            op = agnostic()
        assert (type(op), op(torch.ones(1))) == (Mine, result)


def test_an_agnostic_override_must_derive_from_the_class_of_the_path(agnostic: type[Any]) -> None:
    class Stranger(hw_agnostic.CustomOp):
        pass

    with pytest.raises(OpTypeError, match=r"Subclass hw_agnostic\.resolve"):
        agnostic.register_oot(Stranger)
    hw_agnostic.CustomOp.register_oot(name="Norm")(Stranger)
    with pytest.raises(OpTypeError, match=r"Subclass hw_agnostic\.resolve"):
        agnostic()


def test_an_override_in_the_main_registry_only_warns_once(
    norm: type[Any], agnostic: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @norm.register_oot
    class OnlyMain(norm):  # type: ignore[misc]
        pass

    assert [type(agnostic()) for _ in range(2)] == [agnostic] * 2
    assert sum("OnlyMain overrides 'Norm'" in r.message for r in caplog.records) == 1


def test_a_platform_forward_on_the_agnostic_path_is_an_error() -> None:
    with pytest.raises(OpTypeError, match="would never run"):

        class Op(hw_agnostic.CustomOp):
            def forward_cuda(self, x: Any) -> Any:
                return x


def test_resolve_hands_out_the_class_to_subclass(norm: type[Any], agnostic: type[Any]) -> None:
    module = ModuleType("engine_layers")
    module.RMSNorm, module.Main = agnostic, norm  # type: ignore[attr-defined]
    assert hw_agnostic.resolve(module, "RMSNorm") is agnostic
    with pytest.raises(RegistrationError, match="'RMSNorm'"):
        hw_agnostic.resolve(module, "RMSNrm")
    with pytest.raises(OpTypeError, match="not a hardware-agnostic class"):
        hw_agnostic.resolve(module, "Main")


def test_an_agnostic_layer_checks_the_constructor_too() -> None:
    class Layer(hw_agnostic.PluggableLayer):
        def __init__(self, size: int) -> None:
            super().__init__()

    class Mine(Layer):
        def __init__(self, width: int) -> None:
            super().__init__(width)

    with pytest.raises(OpTypeError, match="no parameter 'size'"):
        Layer.register_oot(Mine)
