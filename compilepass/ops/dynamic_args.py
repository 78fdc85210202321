"""Which dims of which arguments are dynamic, bound to the arguments of a call.

The declaration names arguments of a function and their dims, each optionally with a name that must
have one size over the whole call::

    {"x": 0}                                   # dim 0 of x
    {"x": [0, -1]}                             # two dims
    {"x": {0: "tokens"}, "residual": {0: "tokens"}}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import OpTypeError, OpValueError, did_you_mean

__all__ = ["ArgDims", "DynamicArgs"]

#: What an author writes for one argument.
ArgDims = int | list[int] | tuple[int, ...] | Mapping[int, str | None]


@dataclass(frozen=True)
class DynamicArgs:
    """A checked declaration; ``bind`` applies it to a call."""

    function: str
    signature: inspect.Signature
    dims: Mapping[str, Mapping[int, str | None]]

    @classmethod
    def of(cls, fn: Callable[..., Any], spec: Mapping[str, ArgDims]) -> DynamicArgs:
        """Check a declaration against the signature of ``fn``.

        Raises ``OpTypeError`` for an unknown argument or a dim that is not an integer.
        """
        signature = inspect.signature(fn)
        function = getattr(fn, "__qualname__", repr(fn))
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for argument in spec:
            if argument not in signature.parameters and not open_ended:
                raise OpTypeError(
                    f"dynamic_arg_dims names {argument!r}, which {function} does not have",
                    why=f"Its signature is {signature}.",
                    hint=did_you_mean(str(argument), signature.parameters),
                )
        dims = {argument: _dims(argument, declared) for argument, declared in spec.items()}
        return cls(function, signature, dims)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """The (tensor, dim) pairs of one call, dims counted from the front.

        Raises ``OpTypeError`` where an argument is no tensor (``None`` is left out), and
        ``OpValueError`` for a dim out of range or two sizes under one name.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        pairs: list[tuple[Tensor, int]] = []
        named: dict[str, tuple[str, int]] = {}
        for argument, dims in self.dims.items():
            for label, tensor in self._tensors(bound.arguments, argument):
                for dim, size_name in dims.items():
                    index = self._index(label, tensor, dim)
                    pairs.append((tensor, index))
                    if size_name is not None:
                        self._agree(named, size_name, f"{label}.size({dim})", tensor.shape[index])
        return pairs

    def _tensors(self, arguments: Mapping[str, Any], argument: str) -> Iterator[tuple[str, Tensor]]:
        parameter = self.signature.parameters.get(argument)
        if parameter is None:  # of(): then one of the **kwargs, which a call need not give
            extra = next(
                p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD
            )
            found = {argument: arguments[extra].get(argument)}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            found = {f"{argument}[{i}]": value for i, value in enumerate(arguments[argument])}
        elif parameter.kind is parameter.VAR_KEYWORD:
            found = {f"{argument}[{k!r}]": value for k, value in arguments[argument].items()}
        else:
            found = {argument: arguments[argument]}
        for label, value in found.items():
            if isinstance(value, Tensor):
                yield label, value
            elif value is not None:
                raise OpTypeError(
                    f"{label} of {self.function} is {type(value).__name__}, not a tensor",
                    why="dynamic_arg_dims declares dims of it.",
                    hint="Declare dims of tensor arguments only.",
                )

    def _index(self, label: str, tensor: Tensor, dim: int) -> int:
        if not -tensor.dim() <= dim < tensor.dim():
            raise OpValueError(
                f"dynamic_arg_dims declares dim {dim} of {label}, which has {tensor.dim()} dims",
                why=f"{self.function} was called with the shape {tuple(tensor.shape)}.",
                hint="Correct the declaration, or the call.",
            )
        return dim % tensor.dim()

    def _agree(
        self, named: dict[str, tuple[str, int]], size_name: str, label: str, size: int
    ) -> None:
        first, expected = named.setdefault(size_name, (label, size))
        if expected != size:
            raise OpValueError(
                f"{self.function} was called with two sizes of {size_name!r}: "
                f"{first} is {expected}, {label} is {size}",
                why="Dims with one name have one size.",
                hint="Correct the call, or give the dims different names.",
            )


def _dims(argument: str, declared: ArgDims) -> dict[int, str | None]:
    if isinstance(declared, Mapping):
        dims = dict(declared)
    elif isinstance(declared, list | tuple):
        dims = dict.fromkeys(declared)
    else:
        dims = {declared: None}
    for dim, size_name in dims.items():
        is_dim = isinstance(dim, int) and not isinstance(dim, bool)
        if not is_dim or not isinstance(size_name, str | None):
            raise OpTypeError(
                f"dynamic_arg_dims of {argument!r} is {declared!r}",
                why="Dims are integers, each optionally with a name.",
                hint='Write 0, [0, 1] or {0: "tokens"}.',
            )
    return dims
