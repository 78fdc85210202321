"""Run a plan over graphs: a plain loop, with everything else as instruments around it.

An instrument sees the graph before and after each pass (timing is the manager's own). A pass that
raises leaves the graph as it was before it: rules edit in transactions, other passes run on a graph
of which a copy is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from ..errors import CompilePassError, PassError
from ..kernels import ensure_loaded, find
from ..reporting.records import GraphRecord, MatchRecord, PassRecord, RuleRecord
from ..rewrite import Engine, Reject, Rule, RuleResult, Session
from .base import FusionPass, Pass, PassContext
from .fingerprint import engine_fingerprint, fingerprint
from .plan import Plan

__all__ = ["Instrument", "PassManager"]


class Instrument(Protocol):
    """Watches the passes of one graph; it may read the graph and never changes it."""

    def begin(self, graph: Graph, ctx: PassContext) -> None: ...
    def before(self, pass_: Pass, graph: Graph) -> None: ...
    def after(self, pass_: Pass, graph: Graph, changes: int) -> None: ...
    def failed(self, pass_: Pass, graph: Graph, error: Exception) -> str: ...
    def end(self, graph: Graph, record: GraphRecord) -> None: ...


class PassManager:
    """A plan and the engine that its rules run on.

    ``strict`` makes an error of a pass that raises; without it the graph is restored and the
    record says ``failed``.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        *,
        strict: bool = False,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._strict = strict
        self._instruments = tuple(instruments)
        self._rules: dict[tuple[Pass, PassContext], tuple[Rule, ...]] = {}
        self._uuid: dict[tuple[str, str], str] = {}

    def uuid(self, *extra: str) -> str:
        """The identity of what this manager does to a graph, ``extra`` included."""
        if extra not in self._uuid:
            parts: list[Any] = [torch.__version__, engine_fingerprint(), extra]
            for pass_ in self.plan.running:
                parts += [pass_.name, pass_]
                parts += [(k, getattr(find(k), "version", 0)) for k in pass_.kernels]
                natives = [op.native for k in pass_.kernels if (op := find(k)) is not None]
                parts.append(natives)
            self._uuid[extra] = fingerprint(*parts)  # type: ignore[index]
        return self._uuid[extra]  # type: ignore[index]

    def run(self, graph: Graph, ctx: PassContext, name: str = "graph") -> GraphRecord:
        """Run the plan on ``graph`` in place and return what happened."""
        if any(isinstance(p, FusionPass) for p in self.plan.running):
            ensure_loaded(ctx.device_type)
        nodes_before = len(graph.nodes)
        records: list[PassRecord] = []
        session = _SessionOf(self._engine, graph)
        for instrument in self._instruments:
            instrument.begin(graph, ctx)
        for entry in self.plan.entries:
            if entry.state != "run":
                records.append(PassRecord(entry.name, "disabled", entry.reason))
                continue
            records.append(self._run_pass(entry.pass_, graph, ctx, session))
        record = GraphRecord(
            name=name,
            is_inference=ctx.is_inference,
            device=ctx.device_type,
            nodes_before=nodes_before,
            nodes_after=len(graph.nodes),
            passes=tuple(records),
        )
        for instrument in self._instruments:
            instrument.end(graph, record)
        return record

    def _run_pass(
        self, pass_: Pass, graph: Graph, ctx: PassContext, session: _SessionOf
    ) -> PassRecord:
        refused = pass_.supports(ctx)
        if refused is not None:
            return PassRecord(pass_.name, "skipped", refused.message)
        for instrument in self._instruments:
            instrument.before(pass_, graph)
        start = time.perf_counter()
        try:
            if isinstance(pass_, FusionPass):
                record = self._apply_rules(pass_, ctx, session)
            else:
                record = _run_with_copy(pass_, graph, ctx)
                if record.changes:
                    session.forget()
            graph.lint()
        except Exception as error:
            session.forget()
            return self._failed(pass_, graph, error)
        ms = (time.perf_counter() - start) * 1e3
        for instrument in self._instruments:
            instrument.after(pass_, graph, record.changes)
        return record.with_time(ms)

    def _apply_rules(self, pass_: FusionPass, ctx: PassContext, session: _SessionOf) -> PassRecord:
        rules = self._rules_of(pass_, ctx)
        here = session.get()
        results = [
            here.apply(rule, refusal=None if ctx.is_inference or rule.training else _TRAINING)
            for rule in rules
        ]
        # a near miss is read after all rules, since a later one may have taken its place
        found = tuple(_record(r) for r in results)
        changes = sum(r.count for r in results)
        errors = [r.error for r in results if r.error is not None]
        if errors:
            return self._failed(pass_, here.graph, errors[0], changes, found)
        if rules and not ctx.is_inference and not any(r.training for r in rules):
            return PassRecord(pass_.name, "skipped", _TRAINING.message, rules=found)
        return PassRecord(pass_.name, "ran", changes=changes, rules=found)

    def _rules_of(self, pass_: FusionPass, ctx: PassContext) -> tuple[Rule, ...]:
        key = (pass_, ctx)
        if key not in self._rules:
            self._rules[key] = tuple(pass_.rules(ctx))
        return self._rules[key]

    def _failed(
        self,
        pass_: Pass,
        graph: Graph,
        error: Exception,
        changes: int = 0,
        rules: tuple[RuleRecord, ...] = (),
    ) -> PassRecord:
        places = [i.failed(pass_, graph, error) for i in self._instruments]
        if self._strict:
            raise PassError(
                f"Pass {pass_.name!r} raised {type(error).__name__}: {error}",
                why="strict=True makes this an error.",
                hint=f"Switch it off with '-{pass_.name}' in passes.",
            ) from error
        text = error.what if isinstance(error, CompilePassError) else error
        reason = f"{type(error).__name__}: {text}"
        written = [p for p in places if p]
        if written:
            reason += f" (reproducer: {', '.join(written)})"
        return PassRecord(pass_.name, "failed", reason, changes=changes, rules=rules)


_TRAINING = Reject(
    "training",
    "the graph has a backward pass",
    expected="a graph for inference",
    found="a graph of a training step",
    hint="Run under torch.no_grad(), or write Rule(…, training=True) if the replacement can be "
    "differentiated.",
)


def _record(result: RuleResult) -> RuleRecord:
    return RuleRecord(
        str(result.rule),
        tuple(MatchRecord(s.node, s.sources) for s in result.sites),
        result.near_miss,
        result.refused,
        result.declined,
        result.candidates,
    )


class _SessionOf:
    """The engine's session on one graph, made anew after a pass that is no set of rules."""

    def __init__(self, engine: Engine, graph: Graph) -> None:
        self._engine, self._graph = engine, graph
        self._session: Session | None = None

    def get(self) -> Session:
        if self._session is None:
            self._session = self._engine.session(self._graph)
        return self._session

    def forget(self) -> None:
        self._session = None


def _run_with_copy(pass_: Pass, graph: Graph, ctx: PassContext) -> PassRecord:
    copy, values = _copy(graph)
    try:
        changes = pass_.run(graph, ctx)
        if not isinstance(changes, int) or isinstance(changes, bool):
            raise PassError(
                f"run() of pass {pass_.name!r} returned {changes!r}.",
                hint="Return the number of changes.",
            )
    except Exception:
        _restore(graph, copy, values)
        raise
    return PassRecord(pass_.name, "ran", changes=changes)


def _copy(graph: Graph) -> tuple[Graph, Any]:
    copy = Graph()
    values: dict[Node, Node] = {}
    output = copy.graph_copy(graph, values)
    return copy, output


def _restore(graph: Graph, copy: Graph, output: Any) -> None:
    """Make ``graph`` what ``copy`` was taken from; the output node stays, since others hold it."""
    end = next(n for n in reversed(graph.nodes) if n.op == "output")
    end.args = ((),)
    for node in reversed(list(graph.nodes)):
        if node is not end:
            graph.erase_node(node)
    new: dict[Node, Node] = {}
    with graph.inserting_before(end):
        for node in copy.nodes:
            new[node] = graph.node_copy(node, lambda n: new[n])
    end.args = (torch.fx.map_arg(output, lambda n: new[n]),)


def changed_by(graph: Graph, run: Callable[[], object]) -> int:
    """Run a pass that does not say what it changed; returns 1 if the graph differs after it."""
    before = _text(graph.nodes)
    run()
    return int(_text(graph.nodes) != before)


def _text(nodes: Iterable[Node]) -> list[str]:
    return [n.format_node() or "" for n in nodes]
