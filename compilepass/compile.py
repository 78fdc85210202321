"""Compile a model with the passes, and report on it.

    fast = compile(model, config)        # torch.compile(model, backend=backend(config))
    fast(x)
    print(report(fast))

A :class:`Backend` is the Dynamo backend; it keeps one record per graph. A graph that Inductor takes
from its cache runs no pass, so records are stored under the graph's key and come back from there.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from . import inductor, torch_compat
from .config import CompilationConfig, CompilationMode, get_config
from .errors import ConfigError, ExpectationError, did_you_mean
from .ops import check_policy_names, unmatched_overrides
from .passmanager import Instrument, PassContext, PassManager, Plan, build_plan, known_passes
from .passmanager.dump import Dump
from .reporting import GraphRecord, OpRecord, Report, note, notes
from .reporting.store import load_graphs, save_graphs

__all__ = [
    "Backend",
    "backend",
    "compile",
    "compile_with",
    "dynamo_backend",
    "plan",
    "report",
    "unexpected",
]

M = TypeVar("M", bound=Callable[..., Any])

_OURS = ("inductor", "fx")


@dataclass
class _Slot:
    """One graph of Dynamo's: the records of its forward and backward."""

    records: list[GraphRecord] = field(default_factory=list)
    from_cache: bool = False


class Backend:
    """A Dynamo backend that runs the config's passes; :meth:`report` says what they did.

    Raises :class:`ConfigError` and :class:`PlanError` when it is made, not while compiling.
    """

    __name__ = "compilepass"

    def __init__(
        self,
        config: CompilationConfig,
        model: object = None,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        if config.backend not in _OURS:
            raise ConfigError(
                f"backend={config.backend!r} runs no passes",
                hint="Use 'inductor' or 'fx', or mode=STOCK_TORCH_COMPILE for another backend.",
            )
        self.config = config
        self.plan = plan(config)
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        inductor.check_options(config.inductor_options)
        for name in config.expect:
            if name not in {e.name for e in self.plan.entries}:
                raise ConfigError(
                    f"expect names {name!r}, and there is no such pass",
                    hint=did_you_mean(name, [e.name for e in self.plan.entries]),
                )
        self._dump = (
            Dump(config.debug_dump_path, self.plan, config.to_toml())
            if config.debug_dump_path is not None
            else None
        )
        self._manager = PassManager(
            self.plan,
            inductor.engine(),
            strict=config.strict,
            instruments=[*instruments, *([self._dump] if self._dump is not None else [])],
        )
        self._slots: dict[object, _Slot] = {}
        self._lock = threading.RLock()

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        if kwargs:
            raise ConfigError(
                f"this backend takes no {', '.join(sorted(kwargs))}",
                hint="Put them into the CompilationConfig (inductor_options for Inductor's).",
            )
        inductor.specialize_floats(gm)
        check_policy_names(self.config)
        _report_unmatched_overrides()
        with self._lock:
            frame = inductor.frame_id()
            slot = self._slots[frame if frame is not None else object()] = _Slot()
        uuid = self._manager.uuid(self.config.fingerprint(), self.config.backend)
        key = inductor.graph_key(gm, inputs, uuid)
        run = self._runner(slot, key)
        # a dump wants the passes to run, whatever is cached
        compiled = self._compile(gm, inputs, run, uuid, caches=self._dump is None)
        if not slot.records:  # Inductor had the graph in its cache
            stored = load_graphs(key)
            if stored:
                slot.records, slot.from_cache = list(stored), True
            else:  # its record is gone: have the passes run again
                compiled = self._compile(gm, inputs, run, uuid, caches=False)
        self._after_graph()
        return compiled

    def _compile(
        self, gm: GraphModule, inputs: Sequence[Any], run: Any, uuid: str, caches: bool
    ) -> Callable[..., Any]:
        options = dict(self.config.inductor_options)
        if self.config.use_inductor_graph_partition:
            options["graph_partition"] = True
        return inductor.compile_graph(
            gm,
            inputs,
            run,
            backend=self.config.backend,
            uuid=uuid,
            options=options,
            caches=caches,
        )

    def _runner(self, slot: _Slot, key: str) -> inductor.RunPasses:
        def run(graph: Graph, is_inference: bool) -> None:
            ctx = PassContext(_device_type(graph), self.config.backend, is_inference)
            record = self._manager.run(graph, ctx, f"graph {len(slot.records)}")
            with self._lock:
                slot.records.append(record)
                save_graphs(key, slot.records)

        return run

    # -- reporting -----------------------------------------------------------------------------

    def report(self) -> Report:
        """What happened to the graphs that this backend has compiled so far."""
        with self._lock:
            slots = list(self._slots.values())
        graphs = [g for slot in slots for g in slot.records]
        named = tuple(replace(g, name=f"graph {i}") for i, g in enumerate(graphs))
        return Report(
            graphs=named,
            ops=tuple(_ops(self.config, self._model() if self._model else None)),
            notes=notes(),
            config=self.config.to_toml(),
            from_cache=bool(slots) and all(s.from_cache for s in slots),
        )

    def check(self) -> None:
        """Raise :class:`ExpectationError` where ``expect`` or ``strict`` is not met."""
        found = self.report()
        for name, wanted in self.config.expect.items():
            if found.matches.get(name, 0) != wanted:
                raise unexpected(found, name, f"expect says {wanted}")
        if self.config.strict and found.graphs:
            for name in sorted(self.plan.asked):
                if not found.matches.get(name):
                    raise unexpected(found, name, "strict=True and it was asked for by name")

    def _after_graph(self) -> None:
        found = self.report()
        if self._dump is not None:
            self._dump.finish(found)
        for name, wanted in self.config.expect.items():
            if found.matches.get(name, 0) > wanted:
                raise unexpected(found, name, f"expect says {wanted}")

    def finish_dump(self) -> None:
        """Write the dump's index and report again, after more files have come in."""
        if self._dump is not None:
            self._dump.finish(self.report())


def plan(config: CompilationConfig | None = None) -> Plan:
    """The passes that ``config`` (or the active one) would run, in order, with reasons."""
    config = config or get_config()
    return build_plan(known_passes(config, inductor.adapt_pass), config.pass_policy())


def backend(config: CompilationConfig | None = None) -> Backend:
    """A Dynamo backend for ``torch.compile(model, backend=…)``; the active config by default."""
    return Backend(config or get_config())


def compile(model: M, config: CompilationConfig | None = None, **options: Any) -> M:
    """``torch.compile`` with the config's passes; ``options`` are fields of the config.

    ``mode=NONE`` returns the model as it is, ``STOCK_TORCH_COMPILE`` compiles without passes. With
    ``expect`` or ``strict`` the first call raises :class:`ExpectationError` if a pass matched
    another number of sites. Raises :class:`ConfigError` and :class:`PlanError` at once.
    """
    config = config or get_config()
    if options:
        config = config.model_copy(update=options)
    if config.mode is CompilationMode.NONE:
        return model
    if config.mode is CompilationMode.STOCK_TORCH_COMPILE:
        inductor.check_options(config.inductor_options)
        stock: dict[str, Any] = {"backend": config.backend, **_dynamo_options(config)}
        if config.inductor_options:
            stock["options"] = config.inductor_options
        return cast(M, torch.compile(model, **stock))
    return compile_with(model, Backend(config, model))


def compile_with(model: M, made: Backend) -> M:
    """As :func:`compile`, with a backend that the caller made."""
    fast = torch.compile(model, backend=made, **_dynamo_options(made.config))
    fast = _with_first_call(fast, made)
    _backends[fast] = made
    return fast  # type: ignore[no-any-return]


def _dynamo_options(config: CompilationConfig) -> dict[str, Any]:
    return {"dynamic": config.dynamic, "fullgraph": config.fullgraph, **torch_compat.isolated()}


def _with_first_call(fast: Any, made: Backend) -> Any:
    """Check expectations after the first call, and let depyf watch it where a dump is asked for."""
    from .depyf_dump import watch_first_call

    path = made.config.debug_dump_path
    if path is not None:
        fast = watch_first_call(fast, path / "depyf", made.finish_dump)
    if not made.config.expect and not made.config.strict:
        return fast
    if isinstance(fast, nn.Module):

        def check_once(*_: Any) -> None:
            handle.remove()
            made.check()

        handle = fast.register_forward_hook(check_once)
        return fast

    def checked(*args: Any, **kwargs: Any) -> Any:
        out = fast(*args, **kwargs)
        made.check()
        return out

    return checked


def dynamo_backend(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(model, backend="compilepass")`` finds by its entry point.

    ``options`` may name fields of the config (``{"passes": "none"}``) and Inductor's options;
    ``mode`` is one of ``torch.compile``'s.
    """
    return _default_backend(options or {}, mode)(gm, inputs)


def report(compiled: object = None) -> Report:
    """What the passes did to a compiled model (from :func:`compile`), or to a :class:`Backend`.

    Without an argument: to everything compiled with ``backend="compilepass"`` by name. Raises
    :class:`ConfigError` for what was not compiled by this toolkit.
    """
    if isinstance(compiled, Backend):
        return compiled.report()
    if compiled is None:
        graphs = [g for b in _by_name.values() for g in b.report().graphs]
        first = next(iter(_by_name.values()), None)
        base = first.report() if first is not None else Report(notes=notes())
        return replace(base, graphs=tuple(graphs))
    made = _backends.get(compiled)
    if made is None:
        raise ConfigError(
            f"there is no report on {type(compiled).__name__}",
            why="It was not made by compilepass.compile.",
            hint="Pass what compile() returned; with torch.compile, keep backend = "
            "compilepass.backend(config) and ask report(backend).",
        )
    return made.report()


_backends: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()
_by_name: dict[str, Backend] = {}


def _default_backend(options: dict[str, Any], mode: str | None) -> Backend:
    config = get_config()
    fields = {k: v for k, v in options.items() if k in CompilationConfig.model_fields}
    inductor_options = {k: v for k, v in options.items() if k not in fields}
    if mode not in (None, "default"):
        inductor_options = {**inductor.mode_options(mode), **inductor_options}
    if inductor_options:
        fields["inductor_options"] = {**config.inductor_options, **inductor_options}
    if fields:
        config = config.model_copy(update=fields)
    key = f"{config.fingerprint()} {config.debug_dump_path} {config.expect} {config.strict}"
    if key not in _by_name:
        _by_name[key] = Backend(config)
    return _by_name[key]


def _report_unmatched_overrides() -> None:
    for name in unmatched_overrides():
        note("ops", f"the out-of-tree override of {name!r} replaces nothing: no such class exists")


def unexpected(found: Report, name: str, asked: str) -> ExpectationError:
    """The error that a pass matched not as often as ``asked``, with the near misses."""
    got = found.matches.get(name, 0)
    record = next((p for p in found.passes if p.name == name), None)
    near = [str(n) for n in found.near_misses if n.pass_name == name]
    why = "\n".join(near) or (
        f"it {record.status}: {record.reason}" if record and record.reason else ""
    )
    return ExpectationError(
        f"Pass {name!r} matched {got} time{'s' * (got != 1)}, and {asked}.",
        why=why or "no candidate in the graphs came near a match",
        hint="print(compilepass.report(…)) shows every pass and near miss.",
    )


def _device_type(graph: Graph) -> str:
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            return val.device.type
    return "cpu"


def _ops(config: CompilationConfig, model: nn.Module | None) -> Iterator[OpRecord]:
    """The ops of a model as they were decided; without a model, those counted by the config."""
    if model is not None:
        counts: Counter[OpRecord] = Counter()
        for module in model.modules():
            decision = getattr(module, "decision", None)
            if decision is not None:
                state = "enabled" if decision.enabled else "disabled"
                counts[OpRecord(decision.name, state, decision.why, decision.implementation)] += 1
        yield from (
            replace(op, count=n) for op, n in sorted(counts.items(), key=lambda i: i[0].name)
        )
        return
    policy = config.op_policy()
    for state, names in (
        ("enabled", config.enabled_custom_ops),
        ("disabled", config.disabled_custom_ops),
    ):
        for name, count in sorted(names.items()):
            yield OpRecord(name, state, policy.why(name, True), "", count)
