"""What the manager makes of passes that fail, lie about their changes or break the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import compilepass as cp
from compilepass import Pass, PassContext, Reject, Rule, inductor
from compilepass.errors import PassError
from compilepass.passmanager import Known, PassManager, build_plan, changed_by
from compilepass.reporting import PassRecord

CTX = PassContext("cpu", "fx", True)
aten = torch.ops.aten


def a_graph() -> Graph:
    """``relu(x * y) + x`` with the metadata that the passes see."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = Graph()
    with FakeTensorMode():
        x, y = graph.placeholder("x"), graph.placeholder("y")
        for node in (x, y):
            node.meta["val"] = torch.empty(4, 8)
        for target, args in ((aten.mul.Tensor, (x, y)), (aten.relu.default, None)):
            node = graph.call_function(target, args or (node,))
            node.meta["val"] = torch.empty(4, 8)
        total = graph.call_function(aten.add.Tensor, (node, x))
        total.meta["val"] = torch.empty(4, 8)
    graph.output((total,))
    return GraphModule({}, graph).graph


def manager(*passes: Pass, strict: bool = False, instruments: Any = ()) -> PassManager:
    policy = cp.CompilationConfig().pass_policy()
    plan = build_plan([Known(p, "the test") for p in passes], policy)
    return PassManager(plan, inductor.engine(), strict=strict, instruments=instruments)


def run(graph: Graph, *passes: Pass, strict: bool = False) -> list[PassRecord]:
    return list(manager(*passes, strict=strict).run(graph, CTX).passes)


def a_pass(act: Callable[[Graph], Any], named: str = "culprit") -> Pass:
    class Culprit(Pass):
        name = named

        def run(self, graph: Graph, ctx: PassContext) -> int:
            return act(graph)  # type: ignore[no-any-return]

    return Culprit()


def state(graph: Graph) -> tuple[str, list[Any]]:
    return str(graph), [(n.name, n.op, n.meta.get("val", None) is None) for n in graph.nodes]


def node_of(graph: Graph, target: Any) -> Node:
    return next(n for n in graph.nodes if n.target is target)


# Passes that break the graph, each half-way


def raises_at_once(graph: Graph) -> int:
    raise ValueError("no luck")


def raises_after_an_edit(graph: Graph) -> int:
    relu = node_of(graph, aten.relu.default)
    relu.replace_all_uses_with(relu.args[0])  # type: ignore[arg-type]
    graph.erase_node(relu)
    with graph.inserting_after(node_of(graph, aten.add.Tensor)):
        graph.call_function(aten.neg.default, (node_of(graph, aten.add.Tensor),))
    node_of(graph, aten.mul.Tensor).meta.clear()
    raise ValueError("half-way")


def raises_with_the_output_gone(graph: Graph) -> int:
    graph.erase_node(next(n for n in graph.nodes if n.op == "output"))
    raise ValueError("no output")


def breaks_the_order(graph: Graph) -> int:
    graph.output_node().prepend(node_of(graph, aten.mul.Tensor))
    return 1


def uses_a_node_of_another_graph(graph: Graph) -> int:
    node_of(graph, aten.relu.default).args = (Graph().placeholder("stranger"),)
    return 1


def lies_about_a_broken_graph(graph: Graph) -> int:
    breaks_the_order(graph)
    return 0


def returns_nothing(graph: Graph) -> None:
    node_of(graph, aten.relu.default).target = aten.neg.default


def returns_true(graph: Graph) -> bool:
    returns_nothing(graph)
    return True


def returns_less_than_none(graph: Graph) -> int:
    returns_nothing(graph)
    return -1


CULPRITS = [
    (raises_at_once, "ValueError: no luck"),
    (raises_after_an_edit, "ValueError: half-way"),
    (raises_with_the_output_gone, "ValueError: no output"),
    (breaks_the_order, "RuntimeError: Argument 'mul"),
    (uses_a_node_of_another_graph, "RuntimeError: Argument 'stranger'"),
    (lies_about_a_broken_graph, "RuntimeError: Argument 'mul"),
    (returns_nothing, "PassError: run() of pass 'culprit' returned None."),
    (returns_true, "PassError: run() of pass 'culprit' returned True."),
    (returns_less_than_none, "PassError: run() of pass 'culprit' returned -1."),
]
culprits = pytest.mark.parametrize(
    ("act", "reason"), CULPRITS, ids=[act.__name__ for act, _ in CULPRITS]
)


@culprits
def test_a_failed_pass_is_undone_and_told(act: Callable[[Graph], Any], reason: str) -> None:
    graph = a_graph()
    before = state(graph)
    (record,) = run(graph, a_pass(act))
    assert (record.status, record.changes) == ("failed", 0)
    assert record.reason.startswith(reason)
    assert state(graph) == before
    graph.lint()
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    module = GraphModule({}, graph)
    assert torch.equal(module(x, y)[0], torch.relu(x * y) + x)


@culprits
def test_strict_makes_it_an_error(act: Callable[[Graph], Any], reason: str) -> None:
    with pytest.raises(PassError, match="Pass 'culprit' raised") as error:
        run(a_graph(), a_pass(act), strict=True)
    assert error.value.hint == "Switch it off with '-culprit' in passes."


def test_a_pass_after_a_failed_one_runs_on_the_restored_graph() -> None:
    def seen(graph: Graph) -> int:
        texts.append(str(graph))
        return 0

    texts: list[str] = []
    graph = a_graph()
    before = str(graph)
    records = run(graph, a_pass(raises_after_an_edit), a_pass(seen, "second"))
    assert [r.status for r in records] == ["failed", "ran"]
    assert texts == [before]


def mul_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y)


def relu_mul(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(y * x).neg().neg()


def just_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


INPUTS = {"x": ("T", "H"), "y": ("T", "H")}


def unreadable(x: Tensor, y: Tensor) -> Tensor:
    return x if x.sum() > 0 else y  # reads data


class Rules(cp.FusionPass):
    name = "culprit"
    broken: bool = False

    def rules(self, ctx: PassContext) -> list[Rule]:
        good = Rule(mul_relu, relu_mul, INPUTS)
        return [good, Rule(unreadable, just_add, INPUTS)] if self.broken else [good]


def test_a_rule_that_raises_is_left_out_and_told() -> None:
    graph = a_graph()
    (record,) = run(graph, Rules(broken=True))
    assert (record.status, record.changes) == ("failed", 1)
    assert "unreadable" in record.reason
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=aten.neg.default)) == 2


def test_strict_makes_a_rule_that_raises_an_error_told_once() -> None:
    with pytest.raises(PassError) as error:
        run(a_graph(), Rules(broken=True), strict=True)
    assert error.value.what.count("Pass 'culprit' raised") == 1


def test_a_pass_that_changes_the_graph_does_not_leave_the_rules_a_stale_view() -> None:
    """Even one that says it changed nothing."""

    class Liar(Pass):
        name = "liar"
        after = ("first",)
        before = ("culprit",)

        def run(self, graph: Graph, ctx: PassContext) -> int:
            returns_nothing(graph)
            return 0

    class First(cp.FusionPass):
        name = "first"

        def rules(self, ctx: PassContext) -> list[Rule]:
            return [Rule(just_add, just_add, INPUTS, check=lambda m: m.reject("never"))]

    records = run(a_graph(), First(), Liar(), Rules())
    assert [(r.name, r.changes) for r in records] == [("first", 0), ("liar", 0), ("culprit", 0)]


def test_supports_may_refuse_and_may_not_break_the_compile() -> None:
    class Picky(Pass):
        name = "picky"
        raises: bool = False

        def supports(self, ctx: PassContext) -> Reject | None:
            if self.raises:
                raise KeyError("cannot tell")
            return Reject("device", f"not on {ctx.device_type}")

    (record,) = run(a_graph(), Picky())
    assert (record.status, record.reason) == ("skipped", "not on cpu")
    (record,) = run(a_graph(), Picky(raises=True))
    assert (record.status, record.reason) == ("failed", "KeyError: 'cannot tell'")


def test_rules_leave_a_graph_with_a_backward_pass_alone() -> None:
    record = manager(Rules()).run(a_graph(), PassContext("cpu", "fx", False)).passes[0]
    assert (record.status, record.reason) == ("skipped", "the graph has a backward pass")


def test_a_plain_callable_says_what_it_changed_by_the_graph() -> None:
    graph = a_graph()
    assert changed_by(graph, lambda: None) == 0
    assert changed_by(graph, lambda: returns_nothing(graph)) == 1


def test_instruments_see_each_pass_before_and_after_and_its_failure() -> None:
    class Watch:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def begin(self, graph: Graph, ctx: PassContext) -> None:
            self.seen.append("begin")

        def before(self, pass_: Pass, graph: Graph) -> None:
            self.seen.append(("before", pass_.name))

        def after(self, pass_: Pass, graph: Graph, changes: int) -> None:
            self.seen.append(("after", pass_.name, changes))

        def failed(self, pass_: Pass, graph: Graph, error: Exception) -> str:
            self.seen.append(("failed", pass_.name, str(graph) == before))
            return "somewhere.py"

        def end(self, graph: Graph, record: Any) -> None:
            self.seen.append("end")

    graph, watch = a_graph(), Watch()
    before = str(graph)
    made = manager(a_pass(raises_after_an_edit), a_pass(lambda g: 0, "fine"), instruments=[watch])
    record = made.run(graph, CTX)
    assert watch.seen == [
        "begin",
        ("before", "culprit"),
        ("failed", "culprit", True),
        ("before", "fine"),
        ("after", "fine", 0),
        "end",
    ]
    assert record.passes[0].reason == "ValueError: half-way (reproducer: somewhere.py)"


# Passes written for Inductor


def test_passes_written_for_inductor_run_as_they_are() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphModulePass, CustomGraphPass
    from torch._inductor.pattern_matcher import (
        CallFunction,
        KeywordArg,
        PatternMatcherPass,
        register_graph_pattern,
    )

    class OnGraph(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            node_of(graph, aten.relu.default).target = aten.neg.default

        def uuid(self) -> str:
            return "1"

    class OnModule(CustomGraphModulePass):
        def __call__(self, gm: GraphModule) -> None:
            node_of(gm.graph, aten.neg.default).target = aten.abs.default

        def uuid(self) -> str:
            return "2"

    matcher = PatternMatcherPass(pass_name="z_matcher")

    @register_graph_pattern(CallFunction(aten.abs.default, KeywordArg("x")), pass_dict=matcher)
    def to_relu(match: Any, x: Node) -> None:
        match.replace_by_example(lambda x: aten.relu.default(x), [x])

    def a_function(graph: Graph) -> None:
        assert node_of(graph, aten.relu.default)

    config = cp.CompilationConfig(passes=["+OnGraph", "+OnModule", "+z_matcher", "none"])
    config.register_pass(OnGraph(), before="OnModule")
    config.register_pass(OnModule(), before="z_matcher")
    config.register_pass(matcher)
    config.register_pass(a_function)
    graph = a_graph()
    record = PassManager(cp.plan(config), inductor.engine()).run(graph, CTX)
    found = {p.name: (p.status, p.changes) for p in record.passes if p.status != "disabled"}
    assert found == dict.fromkeys(("OnGraph", "OnModule"), ("ran", 1)) | {"z_matcher": ("ran", 1)}
    assert node_of(graph, aten.relu.default)
