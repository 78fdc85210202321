"""Helpers for tests of models, passes and rules.

    def test_my_model():
        comparison = assert_compiled_close(model, (x,), config)
        expect_matches(comparison.report, fuse_norm_quant=4)

Everything but ``assert_compiled_close`` and ``compare`` runs on the backend ``"fx"``, which
generates no code and takes well under a second.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import inductor
from .comparison import TOLERANCES, Comparison, Inputs, OutputError, Variant, compare
from .compile import Backend, compile_with, plan, report, unexpected
from .config import CompilationConfig, get_config
from .errors import ConfigError, PatternError, did_you_mean
from .passmanager import FusionPass, Pass, PassContext, PassManager, Phase, Plan
from .reporting import GraphRecord, Report
from .rewrite import Rule

__all__ = [
    "TOLERANCES",
    "Comparison",
    "OutputError",
    "Variant",
    "assert_compiled_close",
    "check_pass",
    "check_rule",
    "compare",
    "expect_matches",
    "graph_of",
]


def assert_compiled_close(
    model: Callable[..., Any],
    inputs: Inputs,
    config: CompilationConfig | None = None,
    *,
    factor: float = 2.0,
    emulate_precision_casts: bool = False,
) -> Comparison:
    """Assert that the passes make no error larger; returns what :func:`compare` found.

    Each output's error against float64 may be ``factor`` times the larger of the eager and the
    unfused error, plus ``TOLERANCES[dtype]``. Raises ``AssertionError`` with the errors.
    """
    found = compare(model, inputs, config, emulate_precision_casts=emulate_precision_casts)
    if not found.ok(factor):
        raise AssertionError(found.explain(factor))
    return found


def expect_matches(
    compiled: object, counts: Mapping[str, int] | None = None, /, **more: int
) -> None:
    """Assert how many sites passes have matched: ``expect_matches(fast, fuse_norm_quant=4)``.

    ``compiled`` is what ``compilepass.compile`` returned, a backend, a :class:`Report` or a
    :class:`Comparison`. Raises :class:`ExpectationError` (an ``AssertionError``) with the near
    misses, and :class:`ConfigError` for a pass that does not exist.
    """
    if isinstance(compiled, Comparison):
        compiled = compiled.report
    found = compiled if isinstance(compiled, Report) else report(compiled)
    known = [p.name for p in found.passes]
    for name, wanted in {**(counts or {}), **more}.items():
        if name not in known:
            raise ConfigError(
                f"expect_matches names {name!r}, and the report has no such pass",
                hint=did_you_mean(name, known),
            )
        if found.matches.get(name, 0) != wanted:
            raise unexpected(found, name, f"{wanted} were expected")


def graph_of(
    model: Callable[..., Any], inputs: Inputs, config: CompilationConfig | None = None
) -> GraphModule:
    """The graph of ``model`` after the passes; no code is generated.

    Raises ``AssertionError`` if Dynamo makes another number of graphs than one.
    """
    watch = _Watch()
    config = (config or get_config()).model_copy(update={"backend": "fx"})
    fast = compile_with(model, Backend(config, model, [watch]))
    with torch.no_grad():
        fast(**inputs) if isinstance(inputs, Mapping) else fast(*inputs)
    if len(watch.final) != 1:
        raise AssertionError(f"The model has {len(watch.final)} graphs, not one.")
    return watch.final[0]


def check_pass(
    pass_: Pass | type[Pass],
    model: Callable[..., Any],
    inputs: Inputs,
    *,
    changes: int,
    gone: Sequence[object] = (),
    new: Sequence[object] = (),
    config: CompilationConfig | None = None,
) -> Comparison:
    """Run one pass, and what it requires, over the graph of ``model``, and check what it did.

    ``changes`` is the number it must report; the ops ``gone`` must be in the graph before and not
    after it, the ops ``new`` after and not before (``torch.ops.aten.rsqrt``, ``"aten.rsqrt"``, with
    or without the overload). A second run must change nothing, and the results must be as good as
    without the pass. ``config`` may bring further passes that this one requires. Raises
    ``AssertionError`` with all that is wrong.
    """
    pass_ = pass_() if isinstance(pass_, type) else pass_
    name = pass_.name
    alone: dict[str, Any] = {"backend": "fx", "level": None, "expect": {}, "strict": False}
    config = (config or CompilationConfig()).model_copy(update=alone)
    known = [e.pass_ for e in plan(config).entries if type(e.pass_) is type(pass_)]
    if not known:
        config.register_pass(pass_)
    usual = (known[0] if known else pass_).options()
    options = ", ".join(f"{k}={v!r}" for k, v in pass_.options().items() if v != usual[k])
    config.passes = ["none", f"+{name}" + (f"{{{options}}}" if options else "")]
    watch = _Watch(name)
    found = compare(model, inputs, config, instruments=[watch])
    record = next(p for p in found.report.passes if p.name == name)
    if record.status != "ran":
        raise AssertionError(f"Pass {name!r} {record.status}: {record.reason}")
    problems = []
    if record.changes != changes:
        problems.append(str(unexpected(found.report, name, f"{changes} were expected")))
    before = _ops(watch.before_pass)
    after = _ops(graph for graph, _ in watch.after_pass)
    problems += [f"{op} was not in the graph before" for op in gone if not _is_in(op, before)]
    problems += [f"{op} is still in the graph" for op in gone if _is_in(op, after)]
    problems += [f"{op} was in the graph before" for op in new if _is_in(op, before)]
    problems += [f"{op} is not in the graph" for op in new if not _is_in(op, after)]
    entry = next(e for e in plan(config).entries if e.name == name)
    again = PassManager(Plan((entry,)), inductor.engine(), strict=True)
    for graph, ctx in watch.after_pass:
        more = again.run(graph.graph, ctx).passes[0].changes
        if more:
            problems.append(f"a second run changes the graph {more} more times")
    if not found.ok():
        problems.append(found.explain())
    if problems:
        raise AssertionError(f"Pass {name!r}:\n" + "\n".join(problems))
    return found


def check_rule(rule: Rule, inputs: Mapping[str, Any] | Sequence[Any]) -> Comparison:
    """Check that ``rule`` matches its own pattern once, and that the replacement computes the same.

    ``inputs`` are the pattern's arguments, tensors and numbers, by name or in order. Raises
    ``AssertionError`` with what is wrong, :class:`PatternError` for arguments that do not fit.
    """
    names = [*inspect.signature(rule.pattern).parameters]
    given = dict(inputs if isinstance(inputs, Mapping) else zip(names, inputs, strict=False))
    missing = {*names} - rule.fixed.keys() - given.keys()
    if missing or given.keys() - {*names} or len(given) != len(inputs):
        raise PatternError(
            f"Rule {rule} is checked with {len(inputs)} inputs: {', '.join(given)}",
            why=f"Its pattern takes {', '.join(names)}.",
            hint="Give a tensor for each input and a value for each number.",
        )
    tensors = {n: given.pop(n) for n in rule.inputs}

    def pattern(**tensors: Any) -> Any:
        return rule.pattern(**tensors, **given)

    entries = plan(CompilationConfig()).entries

    class RuleUnderTest(FusionPass):
        name = "rule_under_test"
        requires = tuple(e.name for e in entries if e.pass_.phase is Phase.CANONICALIZE)

        def rules(self, ctx: PassContext) -> Sequence[Rule]:
            return (rule,)

    return check_pass(RuleUnderTest, pattern, tensors, changes=1)


@dataclass
class _Watch:
    """An instrument that keeps copies of the graphs: after all passes, and around one of them."""

    name: str = ""
    before_pass: list[GraphModule] = field(default_factory=list)
    after_pass: list[tuple[GraphModule, PassContext]] = field(default_factory=list)
    final: list[GraphModule] = field(default_factory=list)

    def begin(self, graph: Graph, ctx: PassContext) -> None:
        self._ctx = ctx

    def before(self, pass_: Pass, graph: Graph) -> None:
        if pass_.name == self.name:
            self.before_pass.append(_copy(graph))

    def after(self, pass_: Pass, graph: Graph, changes: int) -> None:
        if pass_.name == self.name:
            self.after_pass.append((_copy(graph), self._ctx))

    def failed(self, pass_: Pass, graph: Graph, error: Exception) -> str:
        return ""

    def end(self, graph: Graph, record: GraphRecord) -> None:
        self.final.append(_copy(graph))


def _copy(graph: Graph) -> GraphModule:
    assert graph.owning_module is not None
    return GraphModule(graph.owning_module, copy.deepcopy(graph))


def _ops(graphs: Iterable[GraphModule]) -> set[str]:
    """The names of the graphs' ops, each with and without its overload."""
    targets = {
        node.target for gm in graphs for node in gm.graph.nodes if node.op == "call_function"
    }
    packets = {t.overloadpacket for t in targets if isinstance(t, torch._ops.OpOverload)}
    return {str(t) for t in (*targets, *packets)}


def _is_in(op: object, ops: set[str]) -> bool:
    return str(op).replace("::", ".") in ops
