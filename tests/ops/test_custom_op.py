"""Registration, dispatch and copies of custom ops."""

from __future__ import annotations

import copy
import pickle
import timeit
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compilepass.config import CompilationConfig, use_config
from compilepass.errors import OpTypeError, RegistrationError
from compilepass.ops import CustomOp, describe, op_registry
from compilepass.platforms import use_platform


class Scale(CustomOp):
    """Module-level, so that it can be pickled."""

    def __init__(self, value: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.weight = nn.Parameter(torch.full((4,), value))

    def forward_native(self, x: Tensor) -> Tensor:
        return x * self.weight

    def forward_cpu(self, x: Tensor) -> Tensor:
        return x * self.weight + 100


@pytest.fixture(autouse=True)
def _scale_is_registered() -> None:
    CustomOp.register("scale_for_tests")(Scale)


def build(words: str = "all", platform: str = "cpu", cls: type[Any] = Scale, **options: Any) -> Any:
    with use_config(CompilationConfig(custom_ops=words)), use_platform(platform):
        return cls(**options)


# Registration


def test_a_second_class_under_a_name_is_an_error_that_names_both() -> None:
    with pytest.raises(RegistrationError) as caught:

        @CustomOp.register("scale_for_tests")
        class Other(CustomOp):
            pass

    assert "Other" in str(caught.value)
    assert f"{__name__}.Scale" in str(caught.value)
    assert op_registry["scale_for_tests"] is Scale


def test_the_same_class_defined_again_takes_its_place() -> None:
    def cell() -> type[CustomOp]:
        @CustomOp.register("cell")
        class Op(CustomOp):
            pass

        return Op

    cell()
    again = cell()
    assert op_registry["cell"] is again


@pytest.mark.parametrize("name", ["", "all", "none", "+x", "a b", "a,b", "1a", "a{b"])
def test_a_name_that_the_policy_cannot_say_is_an_error(name: str) -> None:
    with pytest.raises(RegistrationError, match="cannot be the name"):
        CustomOp.register(name)


@pytest.mark.parametrize("not_a_class", [1, "Scale", Scale.forward_native, nn.Linear])
def test_what_is_no_custom_op_class_is_a_type_error(not_a_class: Any) -> None:
    with pytest.raises(OpTypeError, match="CustomOp"):
        CustomOp.register("whatever")(not_a_class)
    with pytest.raises(TypeError):
        CustomOp.register_oot(name="Scale")(not_a_class)
    with pytest.raises(TypeError):
        CustomOp.register(not_a_class if not isinstance(not_a_class, str) else 1)  # type: ignore[arg-type]


def test_forward_is_final_also_through_a_mixin() -> None:
    class Mixin:
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match="overrides forward"):

        class Direct(CustomOp):
            def forward(self, x: Tensor) -> Tensor:
                return x

    with pytest.raises(TypeError, match="overrides forward"):

        class Mixed(Mixin, CustomOp):  # type: ignore[misc]
            pass


def test_a_static_forward_is_an_error() -> None:
    with pytest.raises(TypeError, match="static"):

        class Static(CustomOp):
            @staticmethod
            def forward_native(x: Tensor) -> Tensor:  # type: ignore[override]
                return x


# Dispatch


def test_enabled_runs_the_kernel_and_disabled_the_native_code() -> None:
    x = torch.ones(4)
    assert build("all")(x).tolist() == [102.0] * 4
    assert build("none")(x).tolist() == [2.0] * 4
    assert build("none", enforce_enable=True)(x).tolist() == [102.0] * 4


def forward_of(method: str) -> Any:
    def forward(self: Any, x: Tensor) -> str:
        return method

    return forward


@pytest.mark.parametrize(
    ("platform", "written", "runs"),
    [
        ("rocm", ["forward_native", "forward_cuda", "forward_hip"], "forward_hip"),
        ("rocm", ["forward_native", "forward_cuda"], "forward_cuda"),
        ("cuda", ["forward_native", "forward_cuda"], "forward_cuda"),
        ("xpu", ["forward_native", "forward_cuda"], "forward_native"),
        ("xpu", ["forward_native", "forward_xpu"], "forward_xpu"),
        ("cpu", ["forward_native", "forward_cuda", "forward_oot"], "forward_native"),
    ],
)
def test_the_platform_chooses_the_forward(platform: str, written: list[str], runs: str) -> None:
    cls = type("Op", (CustomOp,), {method: forward_of(method) for method in written})
    op = build("all", platform, cls)
    assert op.decision.method == runs
    assert getattr(op, op.decision.method)(torch.ones(1)) == runs


def test_cuda_and_native_are_not_implemented_by_default() -> None:
    class Empty(CustomOp):
        pass

    with pytest.raises(NotImplementedError, match="forward_native"):
        build("none", cls=Empty)(torch.ones(1))
    with pytest.raises(NotImplementedError, match="forward_native"):
        build("all", cls=Empty)(torch.ones(1))
    op = build("all", "cuda", Empty)
    with pytest.raises(NotImplementedError, match="forward_cuda"):
        op.forward_hip(torch.ones(1))


def test_a_tensor_on_another_device_goes_to_its_own_forward_or_native() -> None:
    class Op(CustomOp):
        def forward_native(self, x: Any, y: Any = None) -> str:
            return "native"

        def forward_cuda(self, x: Any, y: Any = None) -> str:
            return "cuda"

    class WithCpu(Op):
        def forward_cpu(self, x: Any, y: Any = None) -> str:
            return "cpu"

    on_cpu, on_meta = torch.ones(1), torch.ones(1, device="meta")
    without, with_cpu = build("all", "cuda", Op), build("all", "cuda", WithCpu)
    assert without(on_cpu) == "native"
    assert with_cpu(on_cpu) == "cpu"
    assert with_cpu(y=on_cpu, x=None) == "cpu"
    assert with_cpu(None, on_cpu) == "cpu"
    assert with_cpu(on_meta) == "native"
    assert with_cpu(3) == "cuda"


def test_ops_trace_without_a_graph_break() -> None:
    x = torch.ones(3, 4)

    class WithCuda(Scale):
        def forward_cuda(self, x: Tensor) -> Tensor:
            return x - 1

    for op in (build("all"), build("none"), build("all", "cuda", WithCuda)):
        model = nn.Sequential(op, nn.ReLU(), op)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(("words", "platform"), [("all", "cpu"), ("none", "cpu"), ("all", "cuda")])
def test_blocks_share_one_compile_and_use_their_own_weights(words: str, platform: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    x = torch.ones(3, 4)
    for value in (1.0, 2.0, 3.0):
        block = nn.Sequential(build(words, platform, value=value))
        expected = block(x)
        block.compile(backend=backend, fullgraph=True)
        torch.testing.assert_close(block(x), expected)
    assert len(graphs) == 1


def test_a_natively_compiled_op_is_inlined_when_a_model_is_compiled() -> None:
    op = build("none", compile_native=True)
    assert op.decision.compile_backend == "inductor"
    compiled = torch.compile(op, backend="eager", fullgraph=True)  # Inductor would be slow here
    assert compiled(torch.ones(3, 4)).tolist() == [[2.0] * 4] * 3


# Copies


@pytest.mark.parametrize("words", ["all", "none"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_a_copy_uses_its_own_weights(words: str, duplicate: Any) -> None:
    op = build(words)
    twin = duplicate(op)
    twin.weight = nn.Parameter(torch.zeros(4))
    x = torch.ones(4)
    assert (op(x) - twin(x)).tolist() == [2.0] * 4
    assert twin.decision == op.decision
    assert twin.forward.__self__ is twin
    assert copy.copy(op).forward.__self__ is not op


def test_a_copy_keeps_its_class_while_another_replaces_it() -> None:
    op = build("all")

    @Scale.register_oot
    class Replacement(Scale):
        pass

    assert type(copy.deepcopy(op)) is Scale
    assert type(build("all")) is Replacement


def test_conversion_hooks_and_state_dict_are_those_of_a_plain_module() -> None:
    op = build("none")
    assert list(op.state_dict()) == ["weight"]
    assert op.to(torch.float64)(torch.ones(4)).dtype is torch.float64
    seen: list[int] = []
    op.register_forward_hook(lambda *_: seen.append(1))
    op(torch.ones(4))
    assert seen == [1]
    model = nn.Sequential(build("all"), build("none"))
    assert list(model.state_dict()) == ["0.weight", "1.weight"]


def test_a_call_costs_what_a_plain_module_costs() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Op(CustomOp):
        def forward_native(self, x: Tensor) -> Tensor:
            return x

        def forward_cpu(self, x: Tensor) -> Tensor:
            return x

    x, modules = torch.ones(1), [Plain(), build("all", cls=Op)]
    best = [float("inf"), float("inf")]
    for _ in range(40):  # in turns, so that a busy machine slows both down
        for i, module in enumerate(modules):
            best[i] = min(
                best[i], timeit.timeit("m(x)", globals={"m": module, "x": x}, number=2000)
            )
    assert (best[1] - best[0]) / 2000 < 0.15e-6


# Describe


def test_describe_says_why_each_other_forward_does_not_run() -> None:
    description = describe(build("none,+scale_for_tests"))
    assert description.decision.implementation == f"{__name__}.Scale.forward_cpu"
    assert description.others == {
        "forward_native": "the op is enabled: '+scale_for_tests' in custom_ops",
        "forward_cuda": "not implemented",
        "forward_hip": "alias of cuda",
        "forward_xpu": "alias of native",
        "forward_tpu": "alias of native",
        "forward_hpu": "alias of native",
        "forward_oot": "no override registered",
    }
    with use_config(CompilationConfig(custom_ops="none")), use_platform("cpu"):
        of_class = describe(Scale)
    assert of_class.others["forward_cpu"] == "the op is disabled: base 'none' in custom_ops"
    assert "scale_for_tests: disabled (base 'none' in custom_ops)" in str(of_class)
    assert "missing: it raises" in str(describe(build("all", "cuda")))
    with pytest.raises(TypeError):
        describe(nn.Linear(1, 1))  # type: ignore[arg-type]
