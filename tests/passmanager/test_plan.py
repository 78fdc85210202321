"""Which passes run, in which order, and what the plan says about the others."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import compilepass as cp
from compilepass import ConfigError, FusionPass, Pass, Phase, Rule
from compilepass.errors import PlanError
from compilepass.passmanager import Known, Plan, build_plan


def make(name: str, **attributes: Any) -> Pass:
    """A pass that does nothing, with the given class attributes."""
    cls = type(name.title(), (Pass,), {"name": name, "__module__": __name__, **attributes})
    return cls()  # type: ignore[no-any-return]


def plan_of(*passes: Pass, words: list[str] | None = None, level: int | None = None) -> Plan:
    config = cp.CompilationConfig(passes=words or ["default"], level=level)
    return build_plan([Known(p, "the test") for p in passes], config.pass_policy())


def order(plan: Plan) -> list[str]:
    return [p.name for p in plan.running]


def states(plan: Plan) -> dict[str, tuple[str, str]]:
    return {e.name: (e.state, e.reason) for e in plan.entries}


# Order


def test_phases_come_first() -> None:
    plan = plan_of(
        make("a", phase=Phase.CLEANUP),
        make("b", phase=Phase.LOWER),
        make("c", phase=Phase.FUSE),
        make("d", phase=Phase.CANONICALIZE),
    )
    assert order(plan) == ["d", "c", "b", "a"]


def test_edges_decide_within_a_phase_and_names_break_ties_whatever_the_registration() -> None:
    passes = [make("a", after=("c",)), make("b"), make("c", requires=("d",)), make("d")]
    assert {tuple(order(plan_of(*p))) for p in permutations(passes)} == {("b", "d", "c", "a")}


def test_an_edge_to_a_pass_that_is_not_there_is_ignored() -> None:
    assert order(plan_of(make("a", after=("ghost",), before=("phantom",)))) == ["a"]


def test_a_cycle_names_its_edges_and_who_declared_them_and_no_others() -> None:
    with pytest.raises(PlanError) as error:
        plan_of(
            make("a", after=("c",)), make("b", after=("a",)), make("c", after=("b",)),
            make("later", after=("a",)),
        )  # fmt: skip
    assert error.value.why.split("; ") == [
        "c before a (by A (the test))",
        "a before b (by B (the test))",
        "b before c (by C (the test))",
    ]


def test_a_pass_before_itself_is_a_cycle() -> None:
    with pytest.raises(PlanError, match="a before a"):
        plan_of(make("a", before=("a",)))


def test_an_edge_against_the_phases_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        plan_of(make("early", phase=Phase.CANONICALIZE, after=("late",)), make("late"))
    assert error.value.what == "'late' cannot run before 'early'."
    assert "Early (the test) says so" in error.value.why
    assert "FUSE" in error.value.why and "CANONICALIZE" in error.value.why


# Names


def test_two_passes_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="Two passes are named 'a'"):
        plan_of(make("a"), make("a"))


def test_a_pass_without_a_name_is_refused() -> None:
    with pytest.raises(PlanError, match="has no name"):
        plan_of(make(""))


@pytest.mark.parametrize("word", ["+fuse_nrom", "-fuse_nrom"])
def test_an_unknown_name_brings_the_nearest(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(make("fuse_norm"), words=["default", word])
    assert f"'{word}'" in error.value.what
    assert error.value.hint == "Did you mean 'fuse_norm'?"


# Policy


def test_base_words_and_signs() -> None:
    passes = [make("a"), make("b", default=False), make("c")]
    assert order(plan_of(*passes)) == ["a", "c"]
    assert order(plan_of(*passes, words=["all"])) == ["a", "b", "c"]
    assert order(plan_of(*passes, words=["none", "+b"])) == ["b"]
    off = plan_of(*passes, words=["default", "-a"])
    assert order(off) == ["c"]
    assert states(off)["a"] == ("disabled", "'-a' in passes")


@pytest.mark.parametrize(
    ("level", "running"),
    [(0, []), (1, ["canonical", "clean"]), (2, ["canonical", "fuse", "clean"]),
     (3, ["canonical", "fuse", "optional", "clean"])],
)  # fmt: skip
def test_levels(level: int, running: list[str]) -> None:
    passes = [
        make("canonical", phase=Phase.CANONICALIZE),
        make("fuse"),
        make("optional", default=False),
        make("clean", phase=Phase.CLEANUP),
    ]
    assert order(plan_of(*passes, level=level)) == running


def test_what_a_running_pass_requires_is_switched_on() -> None:
    passes = [make("a", requires=("b",)), make("b", requires=("c",)), make("c")]
    plan = plan_of(*passes, words=["none", "+a"])
    assert order(plan) == ["c", "b", "a"]
    assert states(plan)["c"] == ("run", "required by 'a'")
    assert plan.asked == {"a"}


def test_a_required_pass_that_is_switched_off_switches_off_all_that_need_it() -> None:
    passes = [make("a", requires=("b",)), make("b", requires=("c",)), make("c"), make("d")]
    plan = plan_of(*passes, words=["default", "-c"])
    assert order(plan) == ["d"]
    assert states(plan)["a"] == ("disabled", "requires 'c', which '-c' switches off")
    assert states(plan)["b"] == ("disabled", "requires 'c', which '-c' switches off")


def test_a_pass_that_only_a_switched_off_pass_requires_is_not_switched_on() -> None:
    passes = [make("a", requires=("b", "c")), make("b", default=False), make("c")]
    plan = plan_of(*passes, words=["default", "-c"])
    assert order(plan) == []


def test_a_required_pass_must_exist() -> None:
    with pytest.raises(PlanError, match="requires 'norm_'") as error:
        plan_of(make("a", requires=("norm_",)), make("norm"))
    assert error.value.hint == "Did you mean 'norm'?"


# Options


class Tuned(Pass):
    name = "tuned"

    min_rows: int = 1
    ratio: float = 0.5
    layout: str = "rows"
    limit: int | None = None


def test_the_policy_sets_options() -> None:
    word = "+tuned{min_rows=16, ratio=2, layout=columns, limit=3}"
    (tuned,) = plan_of(Tuned(), words=["none", word]).running
    assert tuned.options() == {"min_rows": 16, "ratio": 2, "layout": "columns", "limit": 3}
    assert Tuned().min_rows == 1


@pytest.mark.parametrize(
    ("word", "what", "hint"),
    [
        ("+tuned{min_row=2}", "has no option 'min_row'", "Did you mean 'min_rows'?"),
        ("+tuned{min_rows=few}", "'min_rows' of pass 'tuned' is 'few'", "Its default is 1."),
        ("+tuned{min_rows=true}", "'min_rows' of pass 'tuned' is True", "Its default is 1."),
        ("+plain{x=1}", "has no option 'x'", "Write '+plain'."),
    ],
)
def test_an_unknown_option_or_value_is_refused(word: str, what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(Tuned(), make("plain"), words=["none", word])
    assert what in error.value.what
    assert error.value.hint == hint


def test_edges_are_tuples_of_names() -> None:
    with pytest.raises(TypeError, match="after is 'b'"):
        make("a", after="b")


# Registered in code


def square(x: Tensor) -> Tensor:
    return x * x


def powered(x: Tensor) -> Tensor:
    return torch.pow(x, 2)


class Mine(Pass):
    name = "mine"
    default = False

    def run(self, graph: Graph, ctx: cp.PassContext) -> int:
        return 0


def on_graph(graph: Graph) -> None: ...


def rule(name: str = "") -> Rule:
    return Rule(square, powered, {"x": ("T",)}, name=name)


def inductor_pass() -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Theirs(CustomGraphPass):
        def __call__(self, graph: Graph) -> None: ...

        def uuid(self) -> str:
            return "theirs"

    return Theirs()


def pattern_matcher_pass() -> Any:
    from torch._inductor.pattern_matcher import PatternMatcherPass

    return PatternMatcherPass(pass_name="matcher")


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda: Mine, ["mine"]),
        (lambda: Mine(), ["mine"]),
        (lambda: [Mine], ["mine"]),
        (lambda: rule(), ["square"]),
        (lambda: [rule("first"), rule("second")], ["first"]),
        (lambda: [rule("first"), Mine], ["first", "mine"]),
        (lambda: on_graph, ["on_graph"]),
        (lambda: inductor_pass(), ["Theirs"]),
        (lambda: pattern_matcher_pass(), ["matcher"]),
    ],
)
def test_everything_that_is_a_pass_can_be_registered(made: Any, names: list[str]) -> None:
    config = cp.CompilationConfig(passes=["default"])
    config.register_pass(made())
    plan = cp.plan(config)
    found = {e.name: e.reason for e in plan.entries if e.origin == "config.register_pass"}
    assert found == dict.fromkeys(names, "registered in the config")
    assert set(names) <= set(order(plan))


def test_a_list_of_rules_is_one_pass_with_all_of_them() -> None:
    config = cp.CompilationConfig(passes=["none", "+first"])
    config.register_pass([rule("first"), rule("second")])
    (made,) = cp.plan(config).running
    assert isinstance(made, FusionPass)
    rules = made.rules(cp.PassContext("cpu", "fx", True))
    assert [r.name for r in rules] == ["first", "second"]


def test_a_function_that_makes_passes_is_called() -> None:
    config = cp.CompilationConfig()
    config.register_pass(lambda: [Mine])
    assert "mine" in order(cp.plan(config))


def test_what_is_no_pass_is_refused() -> None:
    config = cp.CompilationConfig()
    config.register_pass(17)
    with pytest.raises(PlanError, match=r"17 from config\.register_pass is not a pass"):
        cp.plan(config)


def test_registration_orders_against_other_passes() -> None:
    config = cp.CompilationConfig()
    config.register_pass(Mine, after="fuse_add_rms_norm", before=["fuse_act_quant"])
    running = order(cp.plan(config))
    assert running.index("fuse_add_rms_norm") < running.index("mine")
    assert running.index("mine") < running.index("fuse_act_quant")


def test_registration_refuses_an_unknown_neighbour() -> None:
    config = cp.CompilationConfig()
    config.register_pass(Mine, after=["fuse_add_rmsnorm"])
    with pytest.raises(ConfigError, match="names 'fuse_add_rmsnorm'") as error:
        cp.plan(config)
    assert "'fuse_add_rms_norm'" in error.value.hint


def test_a_registered_pass_obeys_the_policy() -> None:
    config = cp.CompilationConfig(passes=["default", "-mine"])
    config.register_pass(Mine)
    assert "mine" not in order(cp.plan(config))
    only_canonical = cp.CompilationConfig(level=1)
    only_canonical.register_pass(Mine)
    assert "mine" not in order(cp.plan(only_canonical))
    nothing = cp.CompilationConfig(passes=["none"])
    nothing.register_pass(Mine)
    assert order(cp.plan(nothing)) == []


def test_the_plan_prints_a_line_a_pass_with_the_reason() -> None:
    plan = plan_of(make("a", phase=Phase.CANONICALIZE), make("bee"), words=["default", "-bee"])
    assert str(plan).splitlines() == [
        "canonicalize a    run      on by default (base 'default' in passes)",
        "fuse         bee  disabled '-bee' in passes",
    ]
