"""Run a plan over graphs: a plain loop, with everything else as instruments around it.

An instrument sees the graph before and after each pass (timing is the manager's own). A pass that
raises, or that leaves the graph invalid, is undone: the graph is restored from a snapshot. A rule
that raises is left out, and the other rules of its pass stand.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch.fx import Graph, Node

from ..errors import CompilePassError, PassError
from ..kernels import ensure_loaded
from ..reporting.records import GraphRecord, MatchRecord, PassRecord, RuleRecord
from ..rewrite import Engine, Reject, Rule, RuleResult, Session
from .base import FusionPass, Pass, PassContext
from .identity import plan_factors
from .plan import Plan

__all__ = ["Instrument", "PassManager", "changed_by"]


class Instrument(Protocol):
    """Watches the passes of one graph; it may read the graph and never changes it."""

    def begin(self, graph: Graph, ctx: PassContext) -> None: ...
    def before(self, pass_: Pass, graph: Graph) -> None: ...
    def after(self, pass_: Pass, graph: Graph, changes: int) -> None: ...
    def failed(self, pass_: Pass, graph: Graph, error: Exception) -> str: ...
    def end(self, graph: Graph, record: GraphRecord) -> None: ...


class PassManager:
    """A plan and the engine that its rules run on.

    ``verify`` runs each rewritten site against what it replaced; one that differs is restored, and
    its pass has failed. ``strict`` makes an error of a pass that fails; without it the graph is
    restored and the record says ``failed``.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        *,
        strict: bool = False,
        verify: bool = False,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._strict = strict
        self._verify = verify
        self._instruments = tuple(instruments)

    def factors(self, device_type: str) -> dict[str, str] | None:
        """What decides how this manager changes a graph on a device (:mod:`.identity`).

        ``None`` if a pass has no identity (its own ``uuid()`` says so): nothing may be cached.
        """
        return plan_factors(self.plan, self._engine, device_type)

    def run(self, graph: Graph, ctx: PassContext) -> GraphRecord:
        """Run the plan on ``graph`` in place and return what happened."""
        if any(isinstance(p, FusionPass) for p in self.plan.running):
            ensure_loaded(ctx.device_type)
        nodes_before = len(graph.nodes)
        records: list[PassRecord] = []
        session = _SessionOf(partial(self._engine.session, graph, verify=self._verify))
        for instrument in self._instruments:
            instrument.begin(graph, ctx)
        for entry in self.plan.entries:
            if entry.state != "run":
                records.append(PassRecord(entry.name, "disabled", entry.reason))
                continue
            records.append(self._run_pass(entry.pass_, graph, ctx, session))
        record = GraphRecord(
            name=ctx.graph,
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
        snapshot = _Snapshot(graph)
        start = time.perf_counter()
        try:
            refused = pass_.supports(ctx)
            if refused is not None:
                return PassRecord(pass_.name, "skipped", refused.message)
            for instrument in self._instruments:
                instrument.before(pass_, graph)
            if isinstance(pass_, FusionPass):
                record = self._apply_rules(pass_, ctx, session)
            else:
                session.forget()
                record = PassRecord(pass_.name, "ran", changes=_run(pass_, graph, ctx))
            if record.changes or not isinstance(pass_, FusionPass):
                graph.lint()
        except Exception as error:
            session.forget()
            snapshot.restore()
            return self._failed(pass_, graph, error)
        ms = (time.perf_counter() - start) * 1e3
        for instrument in self._instruments:
            instrument.after(pass_, graph, record.changes)
        return record.with_time(ms)

    def _apply_rules(self, pass_: FusionPass, ctx: PassContext, session: _SessionOf) -> PassRecord:
        rules = _rules(pass_, ctx)
        here = session.get()
        results = [
            here.apply(rule, refusal=None if ctx.is_inference or rule.training else _TRAINING)
            for rule in rules
        ]
        # a near miss is read after all rules, since a later one may have taken its place
        found = tuple(_record(r) for r in results)
        changes = sum(r.count for r in results)
        errors: list[Exception] = [r.error for r in results if r.error is not None]
        errors += [PassError(r.wrong) for r in results if r.wrong]
        if errors and self._strict:
            raise errors[0]
        if errors:  # the edits of the other rules stand
            return self._failed(pass_, here.graph, errors[0], changes, found)
        if rules and not ctx.is_inference and not any(r.training for r in rules):
            return PassRecord(pass_.name, "skipped", _TRAINING.message, rules=found)
        return PassRecord(pass_.name, "ran", changes=changes, rules=found)

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
    hint="Run under torch.no_grad(), or write Rule(…, training=True) if it may rewrite the forward "
    "and backward graphs of a training step.",
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


@functools.lru_cache(maxsize=512)
def _rules(pass_: FusionPass, ctx: PassContext) -> tuple[Rule, ...]:
    """The rules of a pass, the same objects for every manager: the engine traces each once."""
    return tuple(pass_.rules(ctx))


class _SessionOf:
    """The engine's session on one graph, made anew after a pass that is no set of rules."""

    def __init__(self, start: Callable[[], Session]) -> None:
        self._start = start
        self._session: Session | None = None

    def get(self) -> Session:
        if self._session is None:
            self._session = self._start()
        return self._session

    def forget(self) -> None:
        self._session = None


def _run(pass_: Pass, graph: Graph, ctx: PassContext) -> int:
    changes = pass_.run(graph, ctx)
    if not isinstance(changes, int) or isinstance(changes, bool) or changes < 0:
        raise PassError(
            f"run() of pass {pass_.name!r} returned {changes!r}.",
            hint="Return the number of changes.",
        )
    return changes


class _Snapshot:
    """What a graph was, in plain tuples: much cheaper to take than a copy of the graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = [
            (n, n.name, n.op, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in graph.nodes
        ]

    def restore(self) -> None:
        """Make the nodes anew, under their old names."""
        graph = self._graph
        for node in graph.nodes:
            node.args, node.kwargs = (), {}
        for node in list(graph.nodes):
            graph.erase_node(node)
        graph._graph_namespace = type(graph._graph_namespace)()
        new: dict[Node, Node] = {}
        for old, name, op, target, args, kwargs, kind, meta in self._nodes:
            args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: new[n])
            new[old] = graph.create_node(op, target, args, kwargs, name, kind)
            new[old].meta = meta


def changed_by(graph: Graph, run: Callable[[], object]) -> int:
    """Run a pass that does not say what it changed; returns 1 if the graph differs after it."""
    before = _text(graph.nodes)
    run()
    return int(_text(graph.nodes) != before)


def _text(nodes: Iterable[Node]) -> list[str]:
    return [n.format_node() or "" for n in nodes]
