"""Everything that touches private names of ``torch._inductor`` and ``torch._dynamo``.

Other modules say *what* they want compiled and get plain callables back. Facts that this relies on,
each true for torch 2.11 to 2.14:

* ``compile_fx(gm, inputs, inner_compile=…, config_patches=…)`` calls ``inner_compile`` for each
  graph that no cache has, forward and backward; patches hold for a backward that is compiled later.
* ``post_grad_custom_pre_pass`` sees the functional graph before Inductor's own rewrites (which turn
  mm + add into addmm, for one), and its ``uuid()`` is part of the cache key.
* Under ``dynamic=True`` Dynamo turns a float attribute of a module into a graph input. Asking it to
  specialise the float and to restart keeps the literal, under a guard.

Importing Inductor takes seconds, so each function does it when it is called: ``import compilepass``
and whatever compiles nothing stay quick.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch.fx import Graph, GraphModule
from torch.utils.weak import WeakIdRef

from .errors import CompilePassError, ConfigError, did_you_mean
from .passmanager import Pass, PassContext, changed_by
from .rewrite import Engine

__all__ = [
    "Frame",
    "GraphKind",
    "adapt_pass",
    "backend_of",
    "check_options",
    "compile_graph",
    "current_frame",
    "defunctionalize",
    "engine",
    "graph_factors",
    "mode_options",
    "past_dynamo",
    "specialize_floats",
]


@dataclass(frozen=True)
class GraphKind:
    """Which of the graphs of one Dynamo graph is compiled.

    ``part`` names the body of a higher-order operation (``true_graph_0`` of ``torch.cond``), which
    is a graph of its own, and is empty for the graph as a whole.
    """

    is_inference: bool = True
    is_backward: bool = False
    part: str = ""


RunPasses = Callable[[Graph, GraphKind], None]


@cache
def engine() -> Engine:
    """The rewrite engine with the decompositions that Inductor uses; one per process."""
    from torch._inductor.decomposition import select_decomp_table

    return Engine(select_decomp_table())


# -- compiling -----------------------------------------------------------------------------------


class _Hook(Protocol):
    """Our passes as Inductor's custom pass, behind those that the user had installed already."""

    kinds: Iterator[GraphKind]

    def __call__(self, graph: Graph) -> None: ...


def _hook(run: RunPasses, own_uuid: str | None, users: Sequence[Any]) -> _Hook:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Hook(CustomGraphPass):
        kinds: Iterator[GraphKind] = iter(())

        def __call__(self, graph: Graph) -> None:
            kind = next(self.kinds, GraphKind())
            for user in users:
                _call_user_pass(user, graph, kind.is_inference)
            run(graph, kind)

        def uuid(self) -> Any:
            theirs = [u.uuid() if hasattr(u, "uuid") else None for u in users]
            return None if None in (own_uuid, *theirs) else (own_uuid, *theirs)

    return Hook()


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    run: RunPasses,
    *,
    backend: str,
    uuid: str | None,
    options: Mapping[str, Any],
    caches: bool = True,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with ``run`` as the passes on its forward and backward graphs.

    ``backend`` is ``"inductor"`` or ``"fx"``, which stops before code generation and runs the graph
    itself. ``options`` are Inductor's; ``caches=False`` makes sure that the passes run.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    options = {name.replace("-", "_"): value for name, value in options.items()}
    installed = options.pop("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    hook = _hook(run, uuid, _as_list(installed))
    generate = compile_fx_inner if backend == "inductor" else _fx_inner(hook)

    def inner(graph_module: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        whole = GraphKind(kwargs.get("is_inference", False), kwargs.get("is_backward", False))
        parts = [replace(whole, part=name) for name, _ in _subgraphs(graph_module)]
        hook.kinds = iter([*parts, whole])
        return generate(graph_module, example_inputs, **kwargs)

    patches = {**options, "post_grad_custom_pre_pass": hook}
    if not caches or backend == "fx":
        patches["force_disable_caches"] = True
    return compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)  # type: ignore[return-value]


def _fx_inner(hook: _Hook) -> Callable[..., Any]:
    def inner(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import fake_tensor_prop
        from torch._inductor.fx_passes.post_grad import view_to_reshape

        view_to_reshape(gm)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            fake_tensor_prop(gm, example_inputs)
        for module in [*(body for _, body in _subgraphs(gm)), gm]:
            module.graph.eliminate_dead_code()
            hook(module.graph)
            module.recompile()

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return inner


def _subgraphs(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """The bodies of higher-order operations, in the order in which Inductor runs passes on them."""
    used = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for name, child in gm.named_children():
        if name in used and isinstance(child, GraphModule):
            yield from ((f"{name}.{inner}", body) for inner, body in _subgraphs(child))
            yield name, child


def check_options(options: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for an option that this torch's Inductor does not have."""
    if not options:
        return
    from torch._inductor import config

    known = config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            raise ConfigError(
                f"inductor_options has {name!r}, which torch {torch.__version__} does not know",
                hint=did_you_mean(name, known),
            )


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options for one of ``torch.compile``'s modes."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def _as_list(passes: Any) -> list[Any]:
    if passes is None:
        return []
    return list(passes) if isinstance(passes, (list, tuple)) else [passes]


def _call_user_pass(user: Any, graph: Graph, is_inference: bool) -> None:
    aware = any(c.__name__ == "CustomInferenceAwareGraphPass" for c in type(user).__mro__)
    user(graph, is_inference) if aware else user(graph)


def defunctionalize(graph: Graph) -> int:
    """Turn functionalised calls of mutating ops into plain ones; returns how many there were.

    Which arguments are mutated follows from the op's schema. A tensor is copied first only if its
    old value is used later or belongs to the caller. Inductor does this itself behind our passes.
    """
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
    from torch._inductor.fx_utils import FakeTensorUpdater

    wrappers = torch.ops.higher_order
    wrapped = (wrappers.auto_functionalized, wrappers.auto_functionalized_v2)
    count = sum(n.target in wrapped for n in graph.nodes)
    if count:
        owner: Any = graph.owning_module
        reinplace_inplaceable_ops(FakeTensorUpdater(owner), graph)
        decompose_auto_functionalized(graph)  # type: ignore[no-untyped-call]
    return count


# -- passes written for Inductor -----------------------------------------------------------------


def adapt_pass(pass_like: Any) -> Pass | None:
    """Wrap a pass written for Inductor, or a callable on a graph; ``None`` for anything else."""
    from torch._inductor.custom_graph_pass import CustomGraphModulePass
    from torch._inductor.pattern_matcher import PatternMatcherPass

    if isinstance(pass_like, PatternMatcherPass):
        return _foreign(pass_like, lambda graph: pass_like.apply(graph))
    if isinstance(pass_like, CustomGraphModulePass):
        return _foreign(pass_like, lambda graph: pass_like(graph.owning_module))
    if callable(pass_like) and not isinstance(pass_like, type):
        return _foreign(pass_like, pass_like)
    return None


def _foreign(source: Any, apply: Callable[[Any], Any]) -> Pass:
    label = getattr(source, "pass_name", None) or getattr(source, "__name__", None)

    class Foreign(Pass):
        name = label or type(source).__name__
        implementation: ClassVar[Any] = source

        def run(self, graph: Graph, ctx: PassContext) -> int:
            return changed_by(graph, lambda: apply(graph))

    return Foreign()


# -- Dynamo --------------------------------------------------------------------------------------


@contextmanager
def past_dynamo() -> Iterator[None]:
    """Let errors of ours reach the caller of a compiled model as what they are.

    Inductor and Dynamo raise what a backend raises as the inner exception of one of their own,
    which is no ``ExpectationError`` to a test. They pass on any ``ShortenTraceback``.
    """
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, CompilePassError):
            found = getattr(found, "inner_exception", None) or found.__cause__
        if found is None:
            raise
        raise _as_dynamo_error(found) from found.__cause__


def _as_dynamo_error(error: CompilePassError) -> CompilePassError:
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    names = {"first_useful_frame": None, "__module__": kind.__module__}
    passed_on: type[CompilePassError] = type(kind.__name__, (kind, ShortenTraceback), names)
    made = passed_on.__new__(passed_on, error.what)  # ShortenTraceback's __init__ wants a frame
    made.what, made.why, made.hint = error.what, error.why, error.hint
    return made


def specialize_floats(gm: GraphModule) -> None:
    """Have Dynamo trace again with the floats of modules, globals and closures as literals.

    Floats that the caller passes stay inputs. Does nothing where there are none left.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.source import LocalSource
    from torch._dynamo.symbolic_convert import TensorifyState

    again = False
    for node in gm.graph.nodes:
        if node.op != "call_method" or node.target != "item":
            continue
        source = getattr(node.args[0].meta.get("grapharg"), "source", None)
        value = node.meta.get("example_value")
        if source is None or not isinstance(value, torch.SymFloat):
            continue
        if isinstance(source, LocalSource) and source.is_input:
            continue  # an argument of the compiled function
        symbol = str(value.node._expr)
        if not TensorifyState.should_specialize(symbol):
            TensorifyState.specialize(symbol)
            again = True
    if again:
        raise TensorifyScalarRestartAnalysis


def backend_of(compiled: torch.nn.Module) -> object:
    """The backend that ``torch.compile`` was given for a module, or ``None``."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    if not isinstance(compiled, OptimizedModule):
        return None
    callback = compiled.dynamo_ctx.callback
    wrapper = innermost_backend(callback) if callable(callback) else None
    return getattr(wrapper, "compiler_fn", wrapper)


@dataclass(frozen=True)
class Frame:
    """The Python frame that Dynamo compiles: what it is of, and Dynamo's number for it.

    Dynamo numbers code objects, so models of one class share a number, and starts again at
    ``torch._dynamo.reset()``; ``of`` tells models apart and outlives a reset.
    """

    of: object
    number: object


def current_frame() -> Frame:
    """The frame that is being compiled; a new one, equal to no other, outside of Dynamo."""
    from torch._dynamo.symbolic_convert import tls

    compile_id = torch._guards.CompileContext.current_compile_id()
    translator = getattr(tls, "current_tx", None)
    if compile_id is None or translator is None:
        return Frame(object(), None)
    code = translator.f_code
    # weakly, not by id: a later model may have the address of one that is gone
    models = [WeakIdRef(v) for v in translator.f_locals.values() if isinstance(v, torch.nn.Module)]
    of = (code.co_filename, code.co_firstlineno, code.co_name, *models)
    return Frame(of, compile_id.frame_id)


def graph_factors(gm: GraphModule, inputs: Sequence[Any]) -> dict[str, str]:
    """What decides what a graph is compiled to, apart from the passes, by name."""
    from torch._inductor import config

    code = [m.code for m in gm.modules() if isinstance(m, GraphModule)]
    devices = {item.device.type for item in inputs if isinstance(item, torch.Tensor)}
    autocast = [
        (d, torch.get_autocast_dtype(d))
        for d in devices
        if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d)
    ]
    return {
        "graph": hashlib.sha256("\n".join(code).encode()).hexdigest()[:16],
        "inputs": ", ".join(map(_input_text, inputs)),
        "grad mode": str(torch.is_grad_enabled()),
        "autocast": str(sorted(autocast)),
        "options of Inductor": hashlib.sha256(repr(config.get_hash()).encode()).hexdigest()[:16],
    }


def _input_text(item: Any) -> str:
    if not isinstance(item, torch.Tensor):
        return str(item)
    dtype = str(item.dtype).removeprefix("torch.")
    shape, strides = (" ".join(map(str, sizes)) for sizes in (item.shape, item.stride()))
    grad = " with grad" if item.requires_grad else ""
    return f"{dtype}[{shape}] strides [{strides}] {item.device}{grad}"
