"""``CustomOp``: one operation with a native forward and forwards for platforms.

The decision is taken when the op is built, outside anything that ``torch.compile`` traces, and the
forward that runs is bound to the instance as ``forward``: a call costs what a plain module costs.
Copying and pickling leave that binding out and make it anew, so a copy runs on its own weights.
(The binding is a reference cycle: the garbage collector, not the last ``del``, frees an op.)

    @CustomOp.register("scale", dynamic_arg_dims={"x": 0})
    class Scale(CustomOp):
        def forward_native(self, x): return x * 2
        def forward_cuda(self, x): return my_kernels.scale(x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ..config import get_config
from ..errors import OpTypeError
from ..platforms import FORWARD_METHODS, Platform, current_platform, list_platforms, platform_for
from .decision import Decision, default_on, judge
from .dynamic_args import ArgDims, DynamicArgs
from .maybe_compile import compile_native, native_backend
from .registry import MAIN, check_policy_names
from .replaceable import C, Replaceable

__all__ = ["FALLBACKS", "CustomOp", "DispatchedOp", "decide", "implements"]

#: What a forward does that a class does not override; cuda and native raise instead.
FALLBACKS = {
    "forward_hip": "forward_cuda",
    "forward_xpu": "forward_native",
    "forward_cpu": "forward_native",
    "forward_tpu": "forward_native",
    "forward_hpu": "forward_native",
    "forward_oot": "forward_native",
}


class DispatchedOp(Replaceable):
    """The decision and the dispatch, for both families of custom ops."""

    #: The forwards that this family has, and whether one needs tensors on its platform's device.
    _forwards: ClassVar[tuple[str, ...]]
    _device_bound: ClassVar[bool] = True
    #: Dims of arguments of ``forward_native`` that are dynamic when it is compiled on its own.
    dynamic_arg_dims: ClassVar[Mapping[str, ArgDims] | None] = None

    decision: Decision

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.forward is not DispatchedOp.forward:
            raise OpTypeError(
                f"{cls.__qualname__} overrides forward",
                why="forward is the dispatch between native code and platform kernels.",
                hint="Write forward_native, and forward_cuda, forward_cpu, … for kernels.",
            )
        for method in FORWARD_METHODS:
            if method not in cls.__dict__:
                continue
            if method not in cls._forwards:
                raise OpTypeError(
                    f"{cls.__qualname__} has a {method}, which would never run",
                    why=f"Ops of this family have {' and '.join(cls._forwards)} only.",
                    hint="Derive from compilepass.CustomOp for platform kernels.",
                )
            if isinstance(cls.__dict__[method], staticmethod | classmethod):
                raise OpTypeError(
                    f"{cls.__qualname__}.{method} is static or a class method",
                    why="A forward is called with the op, whose weights it uses.",
                    hint=f"Write def {method}(self, …).",
                )

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = False) -> None:
        """Take the decision for this op.

        ``enforce_enable`` enables it whatever the policy says; ``compile_native`` compiles the
        native forward on its own, for an op that runs where ``torch.compile`` does not see it.
        """
        super().__init__()
        config = get_config()
        check_policy_names(config)
        self.decision = decide(type(self), enforce_enable, compile_native)
        config.count_op(self.decision.name, self.decision.enabled)
        self._bind()

    @classmethod
    def register(
        cls, name: str, *, dynamic_arg_dims: Mapping[str, ArgDims] | None = None
    ) -> Callable[[C], C]:
        """Class decorator that gives an op its name in the policy.

        ``dynamic_arg_dims`` names dims of arguments of ``forward_native`` that are dynamic when it
        is compiled on its own (a class may also set the attribute of that name). Raises
        ``RegistrationError`` for a second class of the name.
        """
        name_class = super().register(name)

        def decorate(op_class: C) -> C:
            cls._require_family(op_class)
            if dynamic_arg_dims is not None:
                DynamicArgs.of(op_class.forward_native, dynamic_arg_dims)  # type: ignore[attr-defined]
                op_class.dynamic_arg_dims = dynamic_arg_dims  # type: ignore[attr-defined]
            return name_class(op_class)

        return decorate

    @classmethod
    def _platform_method(cls, platform: Platform) -> str:
        """The forward that enabled ops of this class run on ``platform``."""
        raise NotImplementedError

    @classmethod
    def enabled(cls) -> bool:
        """Whether ops of this class are enabled under the active config."""
        return judge(cls)[0]

    @classmethod
    def default_on(cls) -> bool:
        """Whether the active config enables ops that no word names."""
        return default_on()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The dispatch (final); on an instance it is the very method that was decided on."""
        return self.__dict__["forward"](*args, **kwargs)

    def make_native(self) -> None:
        """Run the native forward from now on, as a reference for what was decided does."""
        self.decision = replace(
            self.decision,
            enabled=False,
            why="make_native() was called",
            device_type=None,
            method="forward_native",
            compile_backend=None,
            providers=(),
        )
        self._bind()

    def _bind(self) -> None:
        """Bind ``forward`` of this instance to what the decision says."""
        decision = self.decision
        method: Callable[..., Any] = getattr(self, decision.method)
        if decision.compile_backend is not None:
            method = compile_native(method, decision.compile_backend, self.dynamic_arg_dims)
        if decision.providers:
            from ..kernels.preference import preferring
            from ..kernels.registry import steer

            method = preferring(method, steer(dict(decision.providers)))
        if decision.device_type is not None and _has_other_devices(decision.device_type):
            method = self._checking_device(method, decision.device_type)
        self.__dict__["forward"] = method

    def _checking_device(self, method: Callable[..., Any], device_type: str) -> Callable[..., Any]:
        """``method`` for tensors on ``device_type``; the forward of their own device for others."""
        others = {p.device_type for p in list_platforms()} - {device_type}
        elsewhere = {other: self._method_on(platform_for(other)) for other in others}
        native = self.forward_native
        # One attribute look-up, several times cheaper than tensor.device.type.
        is_here = f"is_{device_type}"

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args and getattr(args[0], is_here, False):
                return method(*args, **kwargs)
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    where = value.device.type
                    chosen = method if where == device_type else elsewhere.get(where, native)
                    return chosen(*args, **kwargs)
            return method(*args, **kwargs)

        return forward

    def _method_on(self, platform: Platform) -> Callable[..., Any]:
        method = implementing_method(type(self), platform.forward_method)
        found: Callable[..., Any] = getattr(self, method)
        return found if implements(type(self), method) else self.forward_native

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("forward", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind()

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The operation in PyTorch code, for any device and for Inductor to fuse."""
        raise NotImplementedError(f"{type(self).__qualname__} has no forward_native")


def decide(
    cls: type[DispatchedOp], enforce_enable: bool = False, compile_native: bool = False
) -> Decision:
    """The decision that an op of ``cls`` would take now; nothing is counted."""
    enabled, why = judge(cls, enforce=enforce_enable)
    platform = current_platform()
    wanted = cls._platform_method(platform) if enabled else "forward_native"
    method = implementing_method(cls, wanted)
    native = method == "forward_native"
    return Decision(
        name=cls.name or cls.__name__,
        op_class=f"{cls.__module__}.{cls.__qualname__}",
        enabled=enabled,
        why=why,
        platform=platform.name,
        device_type=platform.device_type if cls._device_bound and not native else None,
        method=method,
        compile_backend=native_backend(compile_native) if native else None,
        providers=() if native else tuple(sorted(get_config().kernel_providers.items())),
    )


def implements(cls: type[DispatchedOp], method: str) -> bool:
    """Whether ``cls`` itself has ``method``, rather than the default of its family."""
    return getattr(cls, method) is not getattr(cls._root(), method)


def implementing_method(cls: type[DispatchedOp], method: str) -> str:
    """The method that runs for ``method``, following the defaults of the family."""
    while method in FALLBACKS and not implements(cls, method):
        method = FALLBACKS[method]
    return method


def _has_other_devices(device_type: str) -> bool:
    # On a machine with nothing but a CPU the check would cost more than a plain call does. There, a
    # kernel meets no other tensors than fake and meta ones, which torch.library handles.
    return device_type != "cpu" or torch.accelerator.is_available()


class CustomOp(DispatchedOp):
    """A module with a native forward and forwards for platforms, chosen by the policy.

    Subclasses write ``forward_native`` and the ``forward_<platform>`` they have kernels for.
    ``forward_hip`` falls back to ``forward_cuda``; xpu, cpu, tpu, hpu and oot to
    ``forward_native``. A tensor that is on another device than the platform's goes to the forward
    of its own device, or to the native one.
    """

    _registry = MAIN
    _forwards = FORWARD_METHODS

    @classmethod
    def _platform_method(cls, platform: Platform) -> str:
        """The platform's, or ``forward_oot`` of a class that stands in for another one."""
        if implements(cls, "forward_oot") and cls._registry.is_replacement(cls):
            return "forward_oot"
        return platform.forward_method

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__qualname__} is enabled and has no forward_cuda: write it, or disable "
            f"the op with '-{self.decision.name}' in custom_ops"
        )

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_cuda(*args, **kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_hpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)
