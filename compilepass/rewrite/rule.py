"""A rewrite rule: three functions over the same variable names.

``pattern`` is ordinary Python and says what to find, ``replacement`` what to put in its place, and
``check`` may refuse a match. Sizes are named in ``inputs``; parameters annotated ``float`` or
``int`` are numbers that take their value from the match; parameters with a default keep it.

    def pattern(x, weight, eps: float):
        return quant_int8(rms_norm(x, weight, eps))

    def replacement(x, weight, eps):
        return torch.ops.compilepass.rms_norm_dynamic_int8_quant(x, weight, eps)

    Rule(pattern, replacement, inputs={"x": ("T", "H"), "weight": ("H",)})
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import sympy
import torch

from ..errors import PatternError
from .record import Decompositions
from .reject import Reject
from .term import BROADCASTS, Size, Term, size_of
from .trace import TensorSpec, Traced, Variable, size_symbol, trace

__all__ = ["Input", "Pattern", "Rule", "below"]

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Input:
    """A tensor of a pattern: sizes by name, number or expression (``"2*H"``), and a fixed dtype.

    A first size ``"..."`` stands for any number of leading dimensions. Without ``dtype`` the tensor
    has the rule's dtype, one for all such inputs of a match. With ``broadcasts`` the leading
    dimensions may be of size 1 or missing where those of the other inputs are not, as those of a
    table are that all heads share; the pattern is traced as if they were all there. The replacement
    sees them as the graph has them, ready to broadcast.
    """

    shape: tuple[str | int, ...]
    dtype: torch.dtype | None = None
    broadcasts: bool = False


@dataclass(frozen=True, eq=False)
class Rule:
    """Find ``pattern``, put ``replacement`` in its place.

    ``inputs`` gives each tensor's shape as names of sizes, ``{"x": ("T", "H")}``. A pattern matches
    tensors of any rank with the same rows: the first size may be several dimensions in the graph.
    The replacement sees the shapes that are written here, and its outputs are viewed back; with
    ``("...", "H")`` it sees the leading dimensions that most of the values have in the graph.
    ``check`` gets the :class:`~compilepass.rewrite.Match` and returns ``None`` or
    ``match.reject("why")``.
    ``dtypes`` are the floating dtypes that the rule is for. ``training=True`` allows the rule in
    graphs that have a backward pass.

    An ``int`` parameter is a size like those of ``inputs``, which may name it
    (``{"x": ("T", "G*group")}``): it is bound wherever it shows in a shape or as an argument.

    ``layout`` says which strides the replacement takes. ``"any"``, the default, hands over the
    graph's values as they are; a kernel made with ``kernels.define`` must take any strides.
    ``"contiguous"`` puts a copy before the replacement where an input is not row-major. Outputs
    come back with the strides of the values that they replace: by a copy where those were
    row-major, and the site is refused (``layout``) where they were not.

    Raises :class:`PatternError` where the functions and ``inputs`` do not fit together.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    inputs: Mapping[str, Sequence[str | int] | Input]
    check: Callable[[Any], Reject | None] | None = None
    name: str = ""
    dtypes: tuple[torch.dtype, ...] = FLOATING
    training: bool = False
    layout: Literal["any", "contiguous"] = "any"
    numbers: tuple[str, ...] = field(default=(), init=False)
    integers: tuple[str, ...] = field(default=(), init=False)
    fixed: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "name", self.name or getattr(self.pattern, "__name__", "rule"))
        set_(self, "pattern", _frozen(self.pattern))
        set_(self, "replacement", _frozen(self.replacement))
        if self.check is not None:
            set_(self, "check", _frozen(self.check))
        inputs = {
            name: spec if isinstance(spec, Input) else Input(_shape_names(self.name, name, spec))
            for name, spec in self.inputs.items()
        }
        set_(self, "inputs", inputs)
        if self.layout not in ("any", "contiguous"):
            raise PatternError(
                f"Rule {self.name!r}: layout is {self.layout!r}.",
                hint="Write 'any', or 'contiguous' for a replacement that needs row-major inputs.",
            )
        self._check_broadcasts()
        self._read_parameters()

    def _check_broadcasts(self) -> None:
        loose = [n for n in self.inputs if self.broadcasts(n)]
        for name in loose:
            if not self.is_open(name) or len(self.specs(self.dtypes[0])[name].shape) < 2:
                raise PatternError(
                    f"Rule {self.name!r}: input {name!r} broadcasts along dimensions with names.",
                    hint="Write ('...', 'H'): the dimensions that '...' stands for broadcast.",
                )
        if loose and not any(self.is_open(n) for n in self.inputs if n not in loose):
            raise PatternError(
                f"Rule {self.name!r}: {', '.join(loose)} broadcast, and nothing that they could "
                "broadcast against begins with '...'."
            )

    def _read_parameters(self) -> None:
        parameters = inspect.signature(self.pattern).parameters
        missing = [n for n in self.inputs if n not in parameters]
        if missing:
            raise PatternError(
                f"Rule {self.name!r}: inputs name {missing}, no parameters of the pattern.",
                why=f"The pattern takes ({', '.join(parameters)}).",
                hint="Use the same names in both.",
            )
        numbers, integers, fixed = [], [], {}
        hints = inspect.get_annotations(self.pattern)
        for name, parameter in parameters.items():
            if name in self.inputs:
                continue
            if parameter.default is not inspect.Parameter.empty:
                fixed[name] = parameter.default
            elif hints.get(name) in (float, "float"):
                numbers.append(name)
            elif hints.get(name) in (int, "int"):
                integers.append(name)
            else:
                raise PatternError(
                    f"Rule {self.name!r}: what is parameter {name!r} of the pattern?",
                    hint=f"Give its shape in inputs={{{name!r}: …}} if it is a tensor, annotate it "
                    f"({name}: float or int) if it is a number, or give it a default if it is "
                    "fixed.",
                )
        taken = set(inspect.signature(self.replacement).parameters)
        if taken != set(parameters):
            raise PatternError(
                f"Rule {self.name!r}: pattern and replacement take different parameters.",
                why=f"pattern({', '.join(parameters)}), replacement({', '.join(taken)})",
                hint="Both are functions of the same variables.",
            )
        object.__setattr__(self, "numbers", tuple(numbers))
        object.__setattr__(self, "integers", tuple(integers))
        object.__setattr__(self, "fixed", fixed)

    @property
    def variants(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the pattern is traced for: one, where every input has its own."""
        fixed = all(isinstance(s, Input) and s.dtype is not None for s in self.inputs.values())
        return self.dtypes[:1] if fixed else self.dtypes

    @property
    def quantised(self) -> frozenset[torch.dtype]:
        """The dtypes of a byte that inputs have."""
        given = {s.dtype for s in self.inputs.values() if isinstance(s, Input)}
        return frozenset(d for d in given if d is not None and d.itemsize == 1)

    @property
    def location(self) -> str:
        """``file.py:line`` of the pattern."""
        code = getattr(self.pattern, "__code__", None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else "?"

    def __str__(self) -> str:
        return f"{self.name} ({self.location})"

    def is_open(self, name: str) -> bool:
        """Whether input ``name`` begins with ``"..."``."""
        spec = self.inputs[name]
        return isinstance(spec, Input) and spec.shape[:1] == ("...",)

    def broadcasts(self, name: str) -> bool:
        """Whether leading dimensions of input ``name`` may be of size 1."""
        spec = self.inputs[name]
        return isinstance(spec, Input) and spec.broadcasts

    def specs(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The input tensors of the variant for ``dtype``."""
        return {
            name: TensorSpec(tuple(_size(s) for s in spec.shape), spec.dtype or dtype)
            for name, spec in self.inputs.items()
            if isinstance(spec, Input)
        }


@dataclass(frozen=True, eq=False)
class Pattern:
    """One rule traced for one dtype.

    ``root`` is the output that all others lead to; ``operations`` are the terms to match, inputs
    and numbers left out, in topological order.
    """

    rule: Rule
    dtype: torch.dtype
    traced: Traced
    root: Term
    operations: tuple[Term, ...]

    @property
    def wanted(self) -> int:
        return len(self.operations)

    def path_from(self, term: Term) -> list[Term]:
        """The operations on one way from ``term``, which is left out, up to the root."""
        path: list[Term] = []
        while term is not self.root:
            term = next(t for t in self.operations if term in t.args)
            path.append(term)
        return path

    @classmethod
    def of(cls, rule: Rule, dtype: torch.dtype, decompositions: Decompositions) -> Pattern:
        """Trace ``rule`` for ``dtype``; a :class:`PatternError` has the rule's name and place."""
        what = f"The pattern of rule {rule}"
        try:
            traced = trace(
                rule.pattern,
                rule.specs(dtype),
                rule.numbers,
                {**rule.fixed, **{n: size_symbol(n) for n in rule.integers}},
                decompositions=decompositions,
                what=what,
                hints=_hints(rule.integers),
            )
        except PatternError:
            raise
        except Exception as error:
            raise PatternError(
                f"{what} cannot be traced for {dtype}: {type(error).__name__}: {error}",
                hint="A pattern is run on tensors without data; it cannot read their values.",
            ) from error
        for name, term in traced.inputs.items():
            if rule.broadcasts(name):
                term.params = BROADCASTS
        ops = tuple(t for t in traced.terms if t.op not in ("input", "const"))
        if not ops:
            raise PatternError(
                f"{what} does nothing.", hint="Return a value computed from its inputs."
            )
        reach = {out: below(out) for out in traced.outputs}
        root = max(traced.outputs, key=lambda out: len(reach[out]))
        apart = [out for out in traced.outputs if out not in reach[root]]
        if apart:
            raise PatternError(
                f"{what} returns values that no single one of its outputs depends on.",
                why="A match is searched from one output downwards.",
                hint="Split it into one rule per output.",
            )
        unused = [n for n, t in traced.inputs.items() if t not in reach[root]]
        unused += sorted({*rule.numbers, *rule.integers} - set(_names(traced.terms)))
        if unused:
            raise PatternError(f"{what} does not use {', '.join(unused)}.", hint="Remove it.")
        return cls(rule, dtype, traced, root, ops)


def _hints(integers: Sequence[str]) -> dict[str, int]:
    """Example values that divide those of the sizes, as groups and heads do."""
    return {size_symbol(n).name: max(16 >> i, 1) for i, n in enumerate(integers)}


def _names(terms: Sequence[Term]) -> Iterator[str]:
    """The numbers and sizes that occur in a pattern, so that a match can bind them."""
    for term in terms:
        for value in (*(term.shape or ()), *(v for _, v in term.params)):
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Variable):
                    yield item.name
                elif isinstance(item, sympy.Expr):
                    yield from (s.name.removeprefix("$") for s in item.free_symbols)


def below(term: Term) -> set[Term]:
    """``term`` and all that it is computed from."""
    seen: set[Term] = set()
    todo = [term]
    while todo:
        t = todo.pop()
        if t not in seen:
            seen.add(t)
            todo.extend(t.args)
    return seen


def _shape_names(rule: str, name: str, shape: Any) -> tuple[str | int, ...]:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise PatternError(
            f"Rule {rule!r}: the shape of {name!r} is {shape!r}.",
            hint=f"Write a tuple of sizes, such as {{{name!r}: ('T', 'H')}}.",
        )
    if "..." in shape[1:]:
        raise PatternError(
            f"Rule {rule!r}: '...' is not the first size of {name!r}.",
            hint="It stands for leading dimensions.",
        )
    return tuple(shape)


@functools.cache
def _size(size: str | int) -> Size:
    if isinstance(size, int):
        return size
    if size == "...":
        return size_symbol(size)
    names = {name: size_symbol(name) for name in re.findall(r"[A-Za-z_]\w*", size)}
    try:
        expr = sympy.parse_expr(size, local_dict=names)
    except (SyntaxError, TypeError, ValueError) as error:
        raise PatternError(f"{size!r} is not a size.", hint="Use a name or '2*H'.") from error
    return size_of(expr)


def _frozen(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``fn`` whose closure keeps today's values, whatever the caller assigns later."""
    if not isinstance(fn, types.FunctionType) or not fn.__closure__:
        return fn
    cells = tuple(types.CellType(c.cell_contents) for c in fn.__closure__)
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    copy.__kwdefaults__, copy.__annotations__ = fn.__kwdefaults__, fn.__annotations__
    copy.__qualname__, copy.__module__ = fn.__qualname__, fn.__module__
    return copy
