"""The registry of fused ops and of the platform kernels that implement them.

A :class:`KernelOp` is a ``torch.library`` op with a schema, a fake and a native reference, so it
runs on every device. A :class:`Provider` implements one op on one device type, and is loaded
(imported, built) when the op is first needed there. How a call finds its kernel:

* The op starts with one kernel, at ``CompositeExplicitAutograd``, whose first call on a device
  *binds* the op: it loads the best providers and puts them at the device's own dispatch key.
* A provider in C++ registers itself there, so that later calls pass through no Python at all. A
  Python function is registered for it. Where a provider may decline a call (``supports``), a
  chooser is registered, that asks them by priority and ends with native.
* Without a usable provider the first kernel stays, and runs native.
* An op that a configuration names a provider for asks with each call which one is preferred.

Outputs are always contiguous. An op that needs gradients runs native, in eager and in compiled
code, so its gradients are native's.

    op = define("demo::scale(Tensor x, float by) -> Tensor", native=lambda x, by: x * by)
    provider("demo::scale", name="mine", device_type="cpu", load=lambda: my_fast_scale)
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..errors import (
    CompilePassError,
    ConfigError,
    KernelError,
    RegistrationError,
    did_you_mean,
)
from ..reporting import note
from .preference import NATIVE, preferred, while_preferring

__all__ = [
    "Availability",
    "KernelOp",
    "Provider",
    "define",
    "ensure_loaded",
    "find",
    "kernel_ops",
    "load",
    "load_plugins",
    "named_provider",
    "needs_grad",
    "prefer",
    "provider",
    "refusals",
    "run_only",
    "steer",
]

PLUGIN_GROUP = "compilepass.kernels"

Function = Callable[..., Any]
Predicate = Callable[..., "str | None"]


@dataclass(frozen=True)
class Availability:
    """Whether a platform kernel runs an op on a device: which one, or why there is none."""

    ok: bool
    provider: str | None
    reason: str


@dataclass(frozen=True)
class Provider:
    """One implementation of one op on one device type; see :func:`provider` for the fields."""

    op: str
    name: str
    device_type: str
    load: Callable[[], Function | None]
    priority: int = 0
    supports: Predicate | None = None
    available: Callable[[], str | None] | None = None
    falls_back: bool = False

    @property
    def may_decline(self) -> bool:
        """Whether each call must be checked with ``supports`` before it reaches the kernel."""
        return self.supports is not None and not self.falls_back


@dataclass(frozen=True)
class KernelOp:
    """A fused op: its schema, its native reference, and questions about its platform kernels."""

    name: str
    schema: str
    native: Function
    fake: Function | None
    version: int
    overload: torch._ops.OpOverload[..., Any]

    def run_native(self, *args: Any, **kwargs: Any) -> Any:
        """``native``, with contiguous outputs as every kernel and fake returns them."""
        out = self.native(*args, **kwargs)
        if isinstance(out, tuple):
            return tuple(t.contiguous() for t in out)
        return out.contiguous() if isinstance(out, Tensor) else out

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the schema declares as written to (``Tensor(a!)``)."""
        arguments = self.overload._schema.arguments
        return tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)

    @property
    def providers(self) -> tuple[Provider, ...]:
        """All registered providers of the op, for every device, best first."""
        return _providers_of(self.name)

    def available(self, device: str | torch.device) -> Availability:
        """Whether a platform kernel, not native, runs the op on ``device``. Loads (builds) it."""
        device_type = torch.device(device).type
        binding = _bind(self.name, device_type)
        if binding.chain:
            return Availability(True, binding.chain[0].name, "")
        refused = (f"{name}: {reason}" for name, reason in binding.refused.items())
        reason = "; ".join(refused) or f"no kernel is registered for {device_type}"
        return Availability(False, None, reason)

    def supports(self, device: str | torch.device, *args: Any) -> str | None:
        """Why no platform kernel takes a call with ``args`` (fake tensors will do), or ``None``."""
        binding = _bind(self.name, torch.device(device).type)
        if not binding.chain:
            return self.available(device).reason
        reasons = []
        for candidate in binding.chain:
            reason = candidate.supports(*args) if candidate.supports else None
            if reason is None:
                return None
            reasons.append(f"{candidate.name}: {reason}")
        return "; ".join(reasons)

    def __reduce__(self) -> tuple[Function, tuple[str]]:
        return _by_name, (self.name,)


@dataclass(frozen=True)
class _Binding:
    """What an op was bound to on a device type: usable providers best first, and the refused."""

    chain: tuple[Provider, ...]
    refused: Mapping[str, str]


_lock = threading.RLock()
_libraries: dict[str, Any] = {}  # Any: torch.library is not typed
_ops: dict[str, KernelOp] = {}
_providers: list[Provider] = []
_loaded: dict[Provider, Function] = {}
_bindings: dict[tuple[str, str], _Binding] = {}
_plugins_loaded = False
_steered: set[str] = set()  # ops whose calls ask for a preferred provider


def define(
    schema: str, *, native: Function, fake: Function | None = None, version: int = 1
) -> KernelOp:
    """Define an op from its schema, ``"namespace::name(Tensor x, ...) -> ..."``.

    ``native`` computes it with plain torch ops and is what runs where no provider does; ``fake``
    returns empty contiguous outputs of the right shape and dtype (by default ``native`` runs on
    fake tensors). Change ``version`` when the meaning changes: compiled code is cached under it.

    Raises:
        RegistrationError: the schema is malformed, or the name is taken by another definition.
            Running the same definition again (a reloaded module) replaces it.
    """
    name = schema.partition("(")[0].strip()
    namespace, separator, short = name.partition("::")
    if not (separator and namespace.isidentifier() and short.isidentifier()):
        raise RegistrationError(
            f"{name!r} is not a kernel name.",
            why="A kernel lives in a namespace of its own.",
            hint="Write the schema as 'namespace::name(Tensor x, ...) -> Tensor'.",
        )
    with _lock:
        known = _ops.get(name)
        if known is None:
            overload = _define_in_torch(namespace, short, schema)
        elif known.schema == schema and _origin(known.native) == _origin(native):
            overload = known.overload
        else:
            raise RegistrationError(
                f"The kernel {name} is defined twice.",
                why=f"It is {known.schema} from {_origin(known.native)} already, and now "
                f"{schema} from {_origin(native)}.",
                hint="Choose another name, or implement the known op with provider().",
            )
        op = KernelOp(name, schema, native, fake, version, overload)
        _ops[name] = op
    return op


def provider(
    op_name: str,
    *,
    name: str,
    device_type: str,
    load: Callable[[], Function | None],
    priority: int = 0,
    supports: Predicate | None = None,
    available: Callable[[], str | None] | None = None,
    falls_back: bool = False,
) -> None:
    """Register an implementation of ``op_name`` for tensors on ``device_type``.

    Args:
        name: what reports call it; unique for this op and device.
        load: called once, when first needed; returns a function with the op's signature, or
            ``None`` when loading registered a kernel at the device's dispatch key by itself.
        priority: the highest that is available runs; native counts as lowest.
        supports: gets a call's arguments, real or fake, and returns ``None`` or why it declines.
        available: returns ``None`` or why it cannot run on this machine, without loading.
        falls_back: the kernel itself runs native for what ``supports`` declines, so that calls
            need not be checked; no provider of lower priority is then ever asked.

    Raises:
        RegistrationError: the op is unknown, or has a provider of this name for the device.
    """
    with _lock:
        if op_name not in _ops:
            raise RegistrationError(
                f"Provider {name!r} implements {op_name}, which is not defined.",
                hint=did_you_mean(op_name, _ops),
            )
        if any((p.op, p.device_type, p.name) == (op_name, device_type, name) for p in _providers):
            raise RegistrationError(
                f"{op_name} has a provider {name!r} for {device_type} already.",
                hint="Give each provider of an op its own name.",
            )
        _providers.append(
            Provider(op_name, name, device_type, load, priority, supports, available, falls_back)
        )
        if _bindings.pop((op_name, device_type), None):
            _bind(op_name, device_type)


def find(op: str | torch._ops.OpOverload[..., Any] | object) -> KernelOp | None:
    """The op of that qualified name or overload (any graph target will do), or ``None``."""
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else op
    return _ops.get(name) if isinstance(name, str) else None


def kernel_ops() -> Mapping[str, KernelOp]:
    """All ops by qualified name, in the order of their definition."""
    with _lock:
        return MappingProxyType(dict(_ops))


def ensure_loaded(device_type: str) -> None:
    """Load the kernels of every op for ``device_type`` now, not in the middle of the first call."""
    for name in kernel_ops():
        _bind(name, device_type)


def load(candidate: Provider) -> Function:
    """The kernel of a provider, whatever its priority, to be called as the op is.

    It is loaded on the first time, and must not be given what ``supports`` declines.
    """
    with _lock:
        key = torch._C._dispatch_key_for_device(candidate.device_type)
        return _kernel(_by_name(candidate.op), candidate, key)


def refusals(op: KernelOp, device_type: str) -> Mapping[str, str]:
    """Which providers were asked for and found unusable on the device, each with the reason."""
    return _bind(op.name, device_type).refused


def steer(providers: Mapping[str, str]) -> Mapping[str, str]:
    """Have these ops (``rms_norm`` or ``my_package::mine``) ask for the provider that is preferred.

    Returns ``providers`` by the qualified names of their ops. From here on, each call of these ops
    passes through Python; nothing is preferred yet.

    Raises:
        ConfigError: there is no such op, or no provider of that name for it.
    """
    load_plugins()
    qualified = {}
    for short, name in providers.items():
        full = short if "::" in short else f"compilepass::{short}"
        op = find(full)
        if op is None:
            known = [n.removeprefix("compilepass::") for n in kernel_ops()]
            raise ConfigError(
                f"kernel_providers names {short!r}, which is not a kernel.",
                hint=did_you_mean(short, known),
            )
        names = {NATIVE, *(p.name for p in op.providers)}
        if name not in names:
            raise ConfigError(
                f"kernel_providers wants {name!r} for {short}, which has no such provider.",
                hint=did_you_mean(name, names),
            )
        qualified[full] = name
    with _lock:
        for full in qualified.keys() - _steered:
            _steered.add(full)
            for bound, device_type in list(_bindings):
                if bound == full:
                    del _bindings[bound, device_type]
                    _bind(bound, device_type)
    return qualified


def prefer(providers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Prefer a provider of each of these ops, or ``native``, in this scope of one thread.

    The others run what it declines, and everything where it is absent. Raises as :func:`steer`.
    """
    return while_preferring(steer(providers))


def named_provider(op: KernelOp, device_type: str, name: str) -> Provider | None:
    """The provider of that name on the device, whether it can run here or not."""
    found = (p for p in op.providers if (p.device_type, p.name) == (device_type, name))
    return next(found, None)


def run_only(candidate: Provider) -> None:
    """Let calls of the op on the provider's device run this provider, else native; for checks."""
    with _lock:
        op, kernel = _by_name(candidate.op), load(candidate)
        _bindings[candidate.op, candidate.device_type] = _Binding((candidate,), {})
        key = torch._C._dispatch_key_for_device(candidate.device_type)
        _install(op, [(candidate, kernel)], key, candidate.device_type)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a call with ``tensors`` must be recorded for backward, so should run native."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _define_in_torch(namespace: str, short: str, schema: str) -> torch._ops.OpOverload[..., Any]:
    library = _libraries.get(namespace)
    if library is None:
        new_library: Callable[..., Any] = torch.library.Library
        library = _libraries[namespace] = new_library(namespace, "FRAGMENT")
    name = f"{namespace}::{short}"
    try:
        library.define(
            schema.partition("::")[2],
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
        )
    except RuntimeError as error:
        raise RegistrationError(
            f"PyTorch does not accept the kernel {name}.",
            why=str(error).splitlines()[0],
            hint="See torch.library.Library.define for the schema's grammar.",
        ) from error
    overload: torch._ops.OpOverload[..., Any] = getattr(
        getattr(torch.ops, namespace), short
    ).default

    def first_call(*args: Any, **kwargs: Any) -> Any:
        if _bind(name, _device_type(args, kwargs)).chain:
            return overload(*args, **kwargs)
        return _ops[name].run_native(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        op = _ops[name]
        return (op.fake or op.run_native)(*args, **kwargs)

    def traced_autograd(*args: Any, **kwargs: Any) -> Any:
        if needs_grad(*_tensors(args, kwargs)):
            return _ops[name].native(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    library.impl(short, first_call, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    # Seen by the tracer of a compiled training step only: eager calls pay nothing for it, and the
    # kernels themselves notice an eager call that needs gradients.
    overload.py_impl(torch._C.DispatchKey.Autograd)(traced_autograd)
    return overload


def _bind(name: str, device_type: str) -> _Binding:
    """Load the providers of an op for a device type, once, and install what they load."""
    binding = _bindings.get((name, device_type))
    if binding is not None:
        return binding
    with _lock:
        load_plugins()
        if (name, device_type) not in _bindings:
            _bindings[name, device_type] = _load(_ops[name], device_type)
        return _bindings[name, device_type]


def _load(op: KernelOp, device_type: str) -> _Binding:
    key = torch._C._dispatch_key_for_device(device_type)
    chain: list[tuple[Provider, Function]] = []
    refused: dict[str, str] = {}
    for candidate in op.providers:
        if candidate.device_type != device_type:
            continue
        try:
            reason = candidate.available() if candidate.available else None
            if reason is None:
                chain.append((candidate, _kernel(op, candidate, key)))
        except Exception as error:
            reason = error.what if isinstance(error, CompilePassError) else repr(error)
            note(f"kernels.{device_type}", f"{candidate.name} kernels cannot be used: {error}")
        if reason is not None:
            refused[candidate.name] = reason
        elif not candidate.may_decline:
            break
    if chain:
        _install(op, chain, key, device_type)
    return _Binding(tuple(candidate for candidate, _ in chain), refused)


def _kernel(op: KernelOp, candidate: Provider, key: str) -> Function:
    """What a provider's ``load`` gives, or has registered by itself; loaded once."""
    if candidate not in _loaded:
        function = candidate.load()
        _loaded[candidate] = (
            _registered_kernel(op, candidate, key)
            if function is None
            else _on_its_device(function, candidate.device_type)
        )
    return _loaded[candidate]


def _on_its_device(function: Function, device_type: str) -> Function:
    """``function`` with the device of its arguments as the current one, where Triton launches."""
    device = getattr(getattr(torch, device_type, None), "device", None)
    if device_type == "cpu" or device is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with device(_tensors(args, kwargs)[0].device):
            return function(*args, **kwargs)

    return run


def _install(
    op: KernelOp, chain: list[tuple[Provider, Function]], key: str, device_type: str
) -> None:
    """Make the chain what a call on the device runs."""
    first, kernel = chain[0]
    if first.may_decline:
        kernel = _chooser(op, chain)
    elif isinstance(kernel, _Registered) and op.name not in _steered:
        return
    if op.name in _steered:
        kernel = _steered_kernel(op, device_type, kernel)
    kernel = _without_gradients(op, kernel)
    namespace, _, short = op.name.partition("::")
    with warnings.catch_warnings():  # the kernel that is overridden is one of the chain
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _libraries[namespace].impl(short, kernel, key, allow_override=True)


def _without_gradients(op: KernelOp, kernel: Function) -> Function:
    """``kernel`` for calls that no gradient is wanted of, and native, which has one, for others."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if needs_grad(*_tensors(args, kwargs)):
            return op.run_native(*args, **kwargs)
        return kernel(*args, **kwargs)

    return run


@dataclass(frozen=True)
class _Registered:
    """A kernel that a provider registered by itself, still callable when it is overridden."""

    kernel: Any
    keyset: torch._C.DispatchKeySet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel.call_boxed(self.keyset, *args, **kwargs)


def _registered_kernel(op: KernelOp, candidate: Provider, key: str) -> _Registered:
    dispatch_key = torch._C.DispatchKey.__members__[key]
    if not op.overload.has_kernel_for_dispatch_key(dispatch_key):
        raise KernelError(
            f"load() returned None and registered no kernel for {op.name} at {key}",
            hint=f"The author of provider {candidate.name!r} must do one of the two.",
        )
    kernel = torch.library.get_kernel(op.overload, dispatch_key)
    return _Registered(kernel, torch._C.DispatchKeySet(dispatch_key))


def _chooser(op: KernelOp, chain: list[tuple[Provider, Function]]) -> Function:
    """A kernel that gives each call to the first provider that takes it, at last to native."""
    links = [(c.supports if c.may_decline else None, function) for c, function in chain]

    def choose(*args: Any, **kwargs: Any) -> Any:
        for supports, function in links:
            if supports is None or supports(*args, **kwargs) is None:
                return function(*args, **kwargs)
        return _ops[op.name].run_native(*args, **kwargs)

    return choose


def _steered_kernel(op: KernelOp, device_type: str, usual: Function) -> Function:
    """A kernel that gives a call to the provider that is preferred for it, if that takes it."""
    kernels: dict[str, tuple[Predicate | None, Function] | None] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        name = preferred(op.name)
        if name is None:
            return usual(*args, **kwargs)
        if name == NATIVE:
            return op.run_native(*args, **kwargs)
        if name not in kernels:
            kernels[name] = _preferred_kernel(op, device_type, name)
        chosen = kernels[name]
        if chosen is None or (chosen[0] is not None and chosen[0](*args, **kwargs) is not None):
            return usual(*args, **kwargs)
        return chosen[1](*args, **kwargs)

    return run


def _preferred_kernel(
    op: KernelOp, device_type: str, name: str
) -> tuple[Predicate | None, Function] | None:
    """The kernel of that provider and what it declines; ``None`` where it is absent."""
    candidate = named_provider(op, device_type, name)
    try:
        if candidate is None or (candidate.available and candidate.available()):
            return None
        return candidate.supports if candidate.may_decline else None, load(candidate)
    except Exception as error:
        note(f"kernels.{device_type}", f"{name} kernels cannot be used: {error}")
        return None


def load_plugins() -> None:
    """Let installed packages register their ops and providers, before anything is bound."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    from ..plugins import iter_plugins

    for plugin in iter_plugins(PLUGIN_GROUP):
        try:
            plugin.load()()
        except Exception as error:
            note("kernels.plugins", f"{plugin.name} of {plugin.distribution} failed: {error!r}")


def _providers_of(name: str) -> tuple[Provider, ...]:
    with _lock:
        own = [p for p in _providers if p.op == name]
    return tuple(sorted(own, key=lambda p: (p.device_type, -p.priority, p.name)))


def _by_name(name: str) -> KernelOp:
    op = find(name)
    if op is None:
        raise KernelError(f"{name} is not a known kernel.", hint=did_you_mean(name, _ops))
    return op


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    leaves: list[Tensor] = []
    for arg in (*args, *kwargs.values()):
        items = arg if isinstance(arg, (list, tuple)) else (arg,)
        leaves.extend(item for item in items if isinstance(item, Tensor))
    return leaves


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    tensors = _tensors(args, kwargs)
    return tensors[0].device.type if tensors else "cpu"


def _origin(function: Function) -> str:
    return f"{function.__module__}.{function.__qualname__}"
