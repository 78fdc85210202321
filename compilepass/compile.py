"""Compile a model with the passes, and report on it.

    fast = compile(model, config)        # torch.compile(model, backend=backend(config))
    fast(x)
    print(report(fast))

A :class:`Backend` is the Dynamo backend; it keeps one record per graph, that of its last compile. A
graph that Inductor takes from its cache runs no pass, so records are stored under the graph's key
and come back from there.
"""

from __future__ import annotations

import contextlib
import functools
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
from .config import CompilationConfig, CompilationMode, config_is_default, get_config, use_config
from .depyf_dump import watching
from .errors import ConfigError, ExpectationError, did_you_mean
from .kernels import find
from .kernels.listing import listed
from .kernels.preference import preferring
from .kernels.registry import steer
from .ops import check_policy_names, unmatched_overrides
from .passmanager import Instrument, PassContext, PassManager, Plan, build_plan, known_passes
from .passmanager.dump import Dump
from .platforms import current_platform
from .reporting import GraphRecord, Note, OpRecord, Report, note, notes
from .reporting.store import Identity, load_graphs, save_graphs

__all__ = [
    "Backend",
    "backend",
    "compile",
    "compile_with",
    "dynamo_backend",
    "explain",
    "plan",
    "report",
    "unexpected",
]

M = TypeVar("M", bound=Callable[..., Any])

_OURS = ("inductor", "fx")


@dataclass
class _Slot:
    """One graph of Dynamo's, with the records of its forward and backward graphs by their names."""

    number: int
    frame: object = None
    records: dict[str, GraphRecord] = field(default_factory=dict)
    from_cache: bool = False

    def name(self, kind: inductor.GraphKind) -> str:
        """``graph 0``, ``graph 0 backward``, ``graph 0 true_graph_0``."""
        parts = ["graph", str(self.number), "backward" if kind.is_backward else "", kind.part]
        return " ".join(filter(None, parts))

    @property
    def has_forward(self) -> bool:
        return any(not record.is_backward for record in self.records.values())

    def load(self, stored: Sequence[GraphRecord]) -> None:
        """Fill in what a cache hit left out; the number in a stored name is another process's."""
        for record in stored:
            name = " ".join(["graph", str(self.number), *record.name.split()[2:]])
            self.records.setdefault(name, replace(record, name=name))


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
        self._default = config_is_default() and config is get_config()
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
            Dump(config.debug_dump_path, self.plan, _config_text(config))
            if config.debug_dump_path is not None
            else None
        )
        self._manager = PassManager(
            self.plan,
            inductor.engine(),
            strict=config.strict,
            verify=config.verify,
            instruments=[*instruments, *([self._dump] if self._dump is not None else [])],
        )
        self._slots: dict[object, list[_Slot]] = {}  # by what is compiled: see inductor.Frame
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        # the copy of a compiled model is compiled on its own, and must not write over the dump
        return Backend(self._config_of_copies(), memo.get(id(self._model and self._model())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Backend, (self._config_of_copies(),)

    def _config_of_copies(self) -> CompilationConfig:
        return self.config.model_copy(update={"debug_dump_path": None})

    @inductor.past_dynamo()
    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        if kwargs:
            raise ConfigError(
                f"this backend takes no {', '.join(sorted(kwargs))}",
                hint="Put them into the CompilationConfig (inductor_options for Inductor's).",
            )
        inductor.specialize_floats(gm)
        check_policy_names(self.config)
        providers = steer(self.config.kernel_providers)
        _report_unmatched_overrides()
        device = next((i.device.type for i in inputs if isinstance(i, torch.Tensor)), "cpu")
        plan_identity = self._identity(device)
        uuid = plan_identity.key if plan_identity is not None else None
        identity = plan_identity and plan_identity.with_factors(inductor.graph_factors(gm, inputs))
        slot = self._next_slot()
        run = self._runner(slot, identity)
        # a dump wants the passes to run, whatever is cached
        caches = identity is not None and not self._dump
        compiled = self._compile(gm, inputs, run, uuid, caches=caches)
        if not slot.has_forward:  # Inductor had the graph in its cache
            slot.load(load_graphs(identity) or () if identity is not None else ())
            slot.from_cache = slot.has_forward
        if not slot.has_forward:  # its record is gone: have the passes run again
            compiled = self._compile(gm, inputs, run, uuid, caches=False)
        self.finish_dump()
        self._check_not_too_many()
        return preferring(compiled, providers) if providers else compiled

    def reset(self) -> None:
        """Dynamo calls this when it is reset: what is compiled again replaces its old record."""
        with self._lock:
            for slot in self._all_slots():
                slot.frame = None

    def _all_slots(self) -> list[_Slot]:
        with self._lock:
            slots = [slot for group in self._slots.values() for slot in group]
        return sorted(slots, key=lambda slot: slot.number)

    def _next_slot(self) -> _Slot:
        """The slot for the frame being compiled: its old one, emptied, or a new one."""
        frame = inductor.current_frame()
        with self._lock:
            group = self._slots.setdefault(frame.of, [])
            old = [s for s in group if s.frame == frame.number] or [
                s for s in group if s.frame is None
            ]
            slot = old[0] if old else _Slot(len(self._all_slots()))
            if not old:
                group.append(slot)
            slot.frame, slot.records, slot.from_cache = frame.number, {}, False
        return slot

    def _compile(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        run: inductor.RunPasses,
        uuid: str | None,
        caches: bool,
    ) -> Callable[..., Any]:
        return inductor.compile_graph(
            gm,
            inputs,
            run,
            backend=self.config.backend,
            uuid=uuid,
            options=_inductor_options(self.config),
            caches=caches,
        )

    def _identity(self, device_type: str) -> Identity | None:
        """What decides what the passes do; ``None`` if a pass does not say what it is."""
        factors = self._manager.factors(device_type)
        if factors is None:
            return None
        own = {f"config.{name}": value for name, value in self.config.factors().items()}
        return Identity(factors).with_factors(own)

    def _runner(self, slot: _Slot, identity: Identity | None) -> inductor.RunPasses:
        records = slot.records

        def run(graph: Graph, kind: inductor.GraphKind) -> None:
            ctx = PassContext(
                _device_type(graph), self.config.backend, kind.is_inference, slot.name(kind)
            )
            record = replace(self._manager.run(graph, ctx), is_backward=kind.is_backward)
            with self._lock:
                records[record.name] = record
                if identity is not None:
                    save_graphs(identity, list(records.values()))
            if kind.is_backward:  # compiled at the first backward pass, when all else is done
                self.finish_dump()

        return run

    # -- reporting -----------------------------------------------------------------------------

    def report(self) -> Report:
        """What happened to the graphs that this backend has compiled so far."""
        slots = self._all_slots()
        return Report(
            graphs=tuple(record for slot in slots for record in slot.records.values()),
            ops=tuple(_ops(self.config, self._model() if self._model else None)),
            notes=(*notes(), *_preferences(self.config)),
            config=_config_text(self.config),
            from_cache=bool(slots) and all(s.from_cache for s in slots),
            default_config=self._default,
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

    def _check_not_too_many(self) -> None:
        if self.config.expect:
            found = self.report()
            for name, wanted in self.config.expect.items():
                if found.matches.get(name, 0) > wanted:
                    raise unexpected(found, name, f"expect says {wanted}")

    def finish_dump(self) -> None:
        """Write the dump's report and index, again when more files have come in."""
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
        return cast(M, torch.compile(model, **_stock(config), **_dynamo_options(config)))
    return compile_with(model, Backend(config, model))


def explain(
    model: Callable[..., Any],
    args: Sequence[Any],
    config: CompilationConfig | None = None,
    *,
    passes: Sequence[str] | None = None,
) -> Report:
    """What the passes would do to ``model(*args)``, without generating code.

    The model is compiled up to Inductor's code generation and called once. Its ops keep the
    decisions that they took when it was built; ops built during the call take those of ``config``.
    ``passes`` replaces the config's pass policy. The ambient grad mode decides whether the graph
    is one of a training step, as in :func:`compile`; ``expect`` and ``strict`` are left out, since
    the report is the answer.
    """
    config = config or get_config()
    ops = config.op_policy()
    update: dict[str, Any] = {"backend": "fx", "expect": {}, "strict": False}
    update["mode"] = CompilationMode.COMPILE_WITH_PASSES
    update["debug_dump_path"] = None
    update["custom_ops"] = [str(ops.base), *(w for w in config.custom_ops if w[:1] in "+-")]
    if passes is not None:
        update["passes"] = list(passes)
    fast = compile(model, config.model_copy(update=update))
    with use_config(config):
        fast(*args)
    return report(fast)


def compile_with(model: M, made: Backend) -> M:
    """As :func:`compile`, with a backend that the caller made."""
    fast = torch.compile(model, backend=made, **_dynamo_options(made.config))
    fast = _with_first_call(fast, made)
    if not isinstance(fast, nn.Module):
        _of_functions[fast] = made
    return fast  # type: ignore[no-any-return]


def _dynamo_options(config: CompilationConfig) -> dict[str, Any]:
    return {"dynamic": config.dynamic, "fullgraph": config.fullgraph, **torch_compat.isolated()}


def _stock(config: CompilationConfig) -> dict[str, Any]:
    """The arguments of ``torch.compile`` that compile as ``config`` does, without its passes."""
    if config.backend == "fx":
        return {"backend": "aot_eager"}
    options = config.inductor_options
    if config.backend == "inductor":
        options = _inductor_options(config)
        inductor.check_options(options)
    return (
        {"backend": config.backend, "options": options} if options else {"backend": config.backend}
    )


def _inductor_options(config: CompilationConfig) -> dict[str, Any]:
    partition = {"graph_partition": True} if config.use_inductor_graph_partition else {}
    return {**config.inductor_options, **partition}


def _config_text(config: CompilationConfig) -> str:
    """The config as TOML, with a comment for each option that only code can set."""
    plain = (bool, int, float, str)
    options = {k: v for k, v in config.inductor_options.items() if isinstance(v, plain)}
    text = config.model_copy(update={"inductor_options": options}).to_toml()
    left = sorted(config.inductor_options.keys() - options.keys())
    return text + "".join(f"# inductor_options.{name} is set in code\n" for name in left)


def _with_first_call(fast: Any, made: Backend) -> Any:
    """Check expectations after the first call, and let depyf watch it where a dump is asked for."""
    path = made.config.debug_dump_path
    if path is None and not made.config.expect and not made.config.strict:
        return fast

    def first_call(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with watching(path / "depyf") if path is not None else contextlib.nullcontext():
            return call(*args, **kwargs)

    def after() -> None:
        made.finish_dump()
        made.check()

    if isinstance(fast, nn.Module):
        forward = fast.forward

        def once(*args: Any, **kwargs: Any) -> Any:
            out = first_call(forward, args, kwargs)
            fast.forward = forward
            after()
            return out

        fast.forward = once
        return fast
    done = False

    @functools.wraps(fast)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done:
            return fast(*args, **kwargs)
        out = first_call(fast, args, kwargs)
        done = True
        after()
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
    if compiled is None:
        return _report_by_name()
    made = compiled if isinstance(compiled, Backend) else _backend_of(compiled)
    if made is None:
        raise ConfigError(
            f"there is no report on {type(compiled).__name__}",
            why="It was not made by compilepass.compile.",
            hint="Pass what compile() returned; with torch.compile, keep backend = "
            "compilepass.backend(config) and ask report(backend).",
        )
    return made.report()


def _backend_of(compiled: object) -> Backend | None:
    if isinstance(compiled, nn.Module):  # a copy of a compiled module is found too
        made = inductor.backend_of(compiled)
        return made if isinstance(made, Backend) else None
    return _of_functions.get(compiled) if callable(compiled) else None


def _report_by_name() -> Report:
    reports = [b.report() for b in _by_name]
    return Report(
        graphs=tuple(g for r in reports for g in r.graphs),
        ops=tuple(dict.fromkeys(o for r in reports for o in r.ops)),
        notes=notes(),
        config="\n".join(r.config for r in reports),
        from_cache=bool(reports) and all(r.from_cache for r in reports),
    )


_of_functions: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()
_by_name: list[Backend] = []
_by_name_lock = threading.Lock()


def _default_backend(options: dict[str, Any], mode: str | None) -> Backend:
    config = get_config()
    fields = {k: v for k, v in options.items() if k in CompilationConfig.model_fields}
    inductor_options = {k: v for k, v in options.items() if k not in fields}
    if mode not in (None, "default"):
        inductor_options = {**inductor.mode_options(mode), **inductor_options}
    if inductor_options:
        fields["inductor_options"] = {**config.inductor_options, **inductor_options}
    config = config.model_copy(update=fields) if fields else config
    with _by_name_lock:
        made = next((b for b in _by_name if b.config == config), None)
        if made is None:
            made = Backend(config)
            _by_name.append(made)
    return made


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


def _preferences(config: CompilationConfig) -> Iterator[Note]:
    """Which provider runs each kernel that the config prefers one for."""
    device = current_platform().device_type
    with use_config(config):
        for name, wanted in steer(config.kernel_providers).items():
            op = find(name)
            assert op is not None
            runs = next(row for row in listed(op) if (row.device, row.state) == (device, "runs"))
            met = runs.provider == wanted
            text = f"{name} runs {runs.provider}" + ("" if met else f", since {wanted} cannot run")
            yield Note("kernel_providers", f"{text} on {device}")


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
