"""What :mod:`compilepass.kernels.verify` checks of a provider, in the child process.

Each check goes over the op's examples, in every dtype, with sizes, strides and values that kernels
stumble over, while all memory that is not written yet holds NaN:

* ``fake``: shapes, dtypes and strides are the fake's, nothing is aliased or written to but what the
  schema says;
* ``opcheck``: :func:`torch.library.opcheck`, of the op with this provider alone;
* ``float64``: as near to the native form in float64 as the dtype allows, or as native itself is;
* ``native``: what native gives for NaN, infinities, the largest and smallest values, and ties.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from .examples import Example, examples_of
from .float64 import InFloat64, widen
from .registry import KernelOp, Provider, find, load, load_plugins, run_only

__all__ = ["CHECKS", "Outcome", "check", "serve"]

CHECKS = ("fake", "opcheck", "float64", "native")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (
    *((rows, 33) for rows in (0, 1, 7, 4097)),
    *((3, width) for width in (1, 2, 3, 8, 31, 64, 255, 1000, 4096, 8191, 16384)),
)
FAKE_SIZES = ((0, 16), (1, 16), (7, 33), (5, 1))
SEED = 20240607

# Of a result against float64: a few roundings to the dtype, relative to it.
FP8 = torch.float8_e4m3fn  # as a result, which may be the neighbour of native's
RTOL = {torch.float32: 4e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, FP8: 2.0**-3}
ATOL = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3, FP8: 2.0**-9}
UNFUSED = 2.0  # how often native's own error is allowed on top
STRAYS = 0.05  # integers: share of elements that may be native's neighbours

Report = Callable[..., None]


@dataclass(frozen=True)
class Outcome:
    """What one check found in one dtype: how many calls were made, declined, and what was wrong.

    ``worst`` is the largest error as a share of what is allowed; ``problem`` is of the first call
    that failed.
    """

    check: str
    dtype: str
    calls: int = 0
    declined: int = 0
    worst: float | None = None
    problem: str = ""


@dataclass
class _Case:
    label: str
    rows: int
    width: int
    dtype: torch.dtype
    args: tuple[Any, ...]
    layout: str = "contiguous"

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        what = [self.label, f"{rows} of {self.width}", _short(self.dtype), self.layout]
        return ", ".join(part for part in what if part)


@dataclass
class _Subject:
    """The op and the provider under test, and where progress is told."""

    op: KernelOp
    provider: Provider
    tell: Report
    kernel: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.kernel = load(self.provider)

    def declines(self, case: _Case) -> bool:
        supports = self.provider.supports
        return supports is not None and supports(*case.args) is not None

    def cases(self, sizes: Iterable[tuple[int, int]], dtype: torch.dtype) -> Iterator[_Case]:
        for label, example in examples_of(self.op.name).items():
            for rows, width in sizes:
                args = self._arguments(example, rows, width, dtype)
                if args is not None:
                    yield _Case(label, rows, width, dtype, args)

    def _arguments(
        self, example: Example, rows: int, width: int, dtype: torch.dtype
    ) -> tuple[Any, ...] | None:
        torch.manual_seed(SEED)
        args = example(rows, width, dtype)
        return None if args is None else _mapped(args, lambda t: t.to(self.provider.device_type))

    def results(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
        """What a call returns and what it leaves in the arguments that it may write to."""
        args = _mapped(args, _clone)
        out = function(*args)
        returned = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
        names = [a.name for a in self.op.overload._schema.arguments]
        given = dict(zip(names, args, strict=False))
        return [*returned, *(given[name] for name in self.op.mutates if name in given)]


def check(op: KernelOp, provider: Provider, name: str, tell: Report) -> Iterator[Outcome]:
    """The outcomes of one check; ``tell(case=...)`` hears of each call before it is made."""
    subject = _Subject(op, provider, tell)
    if name == "opcheck":
        run_only(provider)
        yield _opcheck(subject)
        return
    judge = {"fake": _judge_fake, "float64": _judge_float64, "native": _judge_native}[name]
    for dtype in DTYPES:
        outcome = Outcome(name, _short(dtype))
        for case in _varied(subject, name, dtype):
            outcome = _next(subject, outcome, case, judge)
            if outcome.problem:
                break
        yield outcome


def _next(
    subject: _Subject,
    outcome: Outcome,
    case: _Case,
    judge: Callable[[_Subject, _Case], tuple[float | None, str]],
) -> Outcome:
    if subject.declines(case):
        return replace(outcome, declined=outcome.declined + 1)
    subject.tell(case=f"{outcome.check}: {case}")
    try:
        error, problem = judge(subject, case)
    except Exception as raised:
        message = str(raised).strip().splitlines()
        error, problem = None, f"raises {type(raised).__name__}: {message[0] if message else ''}"
    known = [e for e in (outcome.worst, error) if e is not None]
    return replace(
        outcome,
        calls=outcome.calls + 1,
        worst=max(known, default=None),
        problem=f"{case}: {problem}" if problem else "",
    )


def _varied(subject: _Subject, name: str, dtype: torch.dtype) -> Iterator[_Case]:
    """The calls of a check: sizes, and for one size also strides and values."""
    if name == "native":
        for case in subject.cases([(5, 33)], dtype):
            yield from _extremes(case)
        return
    for case in subject.cases(FAKE_SIZES if name == "fake" else SIZES, dtype):
        yield case
        if case.rows == 7:
            yield from _strided(case)


def _strided(case: _Case) -> Iterator[_Case]:
    for layout, change in LAYOUTS.items():
        yield replace(case, args=_mapped(case.args, change), layout=layout)


def _every_second(t: Tensor) -> Tensor:
    wide = _between(t, (*t.shape, 2))
    wide[..., 0] = t
    return wide[..., 0]


def _inside(t: Tensor) -> Tensor:
    """Rows with something else between them, which nobody is to read."""
    if t.dim() == 0:
        return t
    wide = _between(t, (*t.shape[:-1], t.shape[-1] + 5))
    wide[..., 2:-3] = t
    return wide[..., 2:-3]


def _turned(t: Tensor) -> Tensor:
    if t.dim() < 2:
        return t
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def _between(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    wide = t.new_zeros(shape)
    return wide.fill_(float("nan")) if t.is_floating_point() else wide.fill_(1)


LAYOUTS = {"every second element": _every_second, "inside": _inside, "transposed": _turned}


def _extremes(case: _Case) -> Iterator[_Case]:
    """One value somewhere in a row and all along another, in the first floating argument."""
    at = next(
        (
            i
            for i, a in enumerate(case.args)
            if isinstance(a, Tensor) and a.is_floating_point() and a.dim() > 1 and a.dtype != FP8
        ),
        None,
    )
    if at is None:
        return
    limits = torch.finfo(case.dtype)
    values = {
        "zeros": 0.0,
        "NaN": float("nan"),
        "inf": float("inf"),
        "-inf": -float("inf"),
        "nearly the largest": 0.875 * limits.max,
        "nearly the lowest": 0.875 * limits.min,
        "the smallest": limits.tiny,
        "large": min(1e4, limits.max / 4),
    }
    for name, value in values.items():
        changed = case.args[at].clone()
        rows = changed.flatten(0, -2)
        rows[1, 0] = value
        rows[2] = value
        yield replace(case, args=_with(case.args, at, changed), layout=name)
    # integers and halves up to 127: quantised with a step of 1, every second one is a tie
    changed = case.args[at].clone()
    width = changed.shape[-1]
    ties = (torch.arange(width, device=changed.device) % 255 - 127).to(changed.dtype) / 2
    ties[-1] = 127
    changed[:] = ties
    yield replace(case, args=_with(case.args, at, changed), layout="ties")


def _with(args: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*args[:at], value, *args[at + 1 :])


# The checks. Each says how much of the allowed error there is, and what is wrong.


def _judge_fake(subject: _Subject, case: _Case) -> tuple[float | None, str]:
    op = subject.op
    with FakeTensorMode() as mode:
        promised = _tensors(op.overload(*_mapped(case.args, mode.from_tensor)))
    args = _mapped(case.args, _clone)
    real = _tensors(subject.kernel(*args))
    if len(real) != len(promised):
        return None, f"returns {len(real)} tensors, and the fake {len(promised)}"
    for i, (mine, fake) in enumerate(zip(real, promised, strict=True)):
        for what in ("shape", "dtype", "stride", "device"):
            a, b = (_property(t, what) for t in (mine, fake))
            if a != b:
                return None, f"output {i} has the {what} {a}, and the fake says {b}"
    if problem := _aliases(op, args, real):
        return None, problem
    schema = op.overload._schema.arguments
    for argument, before, after in zip(schema, case.args, args, strict=False):
        if (
            isinstance(before, Tensor)
            and argument.name not in op.mutates
            and not _same(before, after)
        ):
            return None, f"writes to {argument.name}, which the schema does not say"
    return None, ""


def _aliases(op: KernelOp, args: tuple[Any, ...], outputs: list[Tensor]) -> str:
    returns = op.overload._schema.returns
    storages = {_storage(a): "an argument" for a in args if isinstance(a, Tensor) and a.numel()}
    for i, (out, declared) in enumerate(zip(outputs, returns, strict=True)):
        if declared.alias_info is None and out.numel() and _storage(out) in storages:
            return f"output {i} shares the memory of {storages[_storage(out)]}"
        storages[_storage(out)] = f"output {i}"
    return ""


def _opcheck(subject: _Subject) -> Outcome:
    outcome = Outcome("opcheck", "")
    for case in subject.cases([(3, 16)], torch.float32):
        if subject.declines(case):
            case = next(
                (
                    half
                    for dtype in DTYPES[1:]
                    for half in subject.cases([(3, 16)], dtype)
                    if half.label == case.label and not subject.declines(half)
                ),
                case,
            )
        outcome = _next(subject, outcome, case, _judge_opcheck)
        if outcome.problem:
            break
    return outcome


def _judge_opcheck(subject: _Subject, case: _Case) -> tuple[float | None, str]:
    tests = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, Tensor) and a.dtype == FP8 for a in case.args):
        tests.append("test_schema")  # which multiplies the arguments, as fp8 cannot be
    found = torch.library.opcheck(
        subject.op.overload, case.args, test_utils=tests, raise_exception=False
    )
    failed = {test: result for test, result in found.items() if result != "SUCCESS"}
    for test, result in failed.items():
        lines = [line.strip() for line in str(result).splitlines() if line.strip()]
        return None, f"{test}: {lines[0] if lines else result}"
    return None, ""


def _judge_float64(subject: _Subject, case: _Case) -> tuple[float | None, str]:
    exact, native = _exact(subject, case), _native(subject, case)
    mine = subject.results(subject.kernel, case.args)
    worst = 0.0
    for i, (out, unfused, reference) in enumerate(zip(mine, native, exact, strict=True)):
        if out.shape != reference.shape:
            return None, f"output {i} is {tuple(out.shape)}, not {tuple(reference.shape)}"
        if not out.numel():
            continue
        share = _error(out, unfused, reference, case.dtype)
        worst = max(worst, float(share.max()))
        if worst > 1 or share.isnan().any():
            return worst, f"output {i}: {_where(share, out, reference)}"
    return worst, ""


def _error(out: Tensor, native: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Each element's error as a share of what is allowed; NaN where only one is a number."""
    floating = out.is_floating_point()
    dtype = FP8 if out.dtype == FP8 else dtype
    out, native, exact = out.double(), native.double(), exact.double()
    unfused = (native - exact).abs().nan_to_num(0.0, 0.0)
    if unfused.dim():
        unfused = unfused.amax(-1, keepdim=True)
    allowed = (ATOL[dtype] if floating else 1) + RTOL[dtype] * exact.abs() + UNFUSED * unfused
    return torch.where(exact.isnan() & out.isnan(), 0.0, (out - exact).abs() / allowed)


def _judge_native(subject: _Subject, case: _Case) -> tuple[float | None, str]:
    native = _native(subject, case)
    mine = subject.results(subject.kernel, case.args)
    exact = _exact(subject, case)
    # a row that has no finite result has no integers either
    finite = [t.double().isfinite().all(-1, keepdim=True) for t in native if t.is_floating_point()]
    # where native has lost its digits, nobody need lose the same
    for i, (out, wanted, reference) in enumerate(zip(mine, native, exact, strict=True)):
        if out.is_floating_point():
            better = _error(out, wanted, reference, case.dtype) <= 1
            wrong = ~(_near(out, wanted, case.dtype) | better)
        else:
            steps = (out.double() - wanted.double()).abs()
            for rows in finite:
                if rows.shape[:-1] == steps.shape[:-1]:
                    steps = torch.where(rows, steps, 0.0)
            lost = (wanted.double() - reference.double()).abs().amax(-1, keepdim=True) > 1
            steps = torch.where(lost & (steps > 1), 0.0, steps)
            wrong = steps > (1 if (steps > 0).sum() <= 2 + STRAYS * steps.numel() else 0)
        if wrong.any():
            return None, f"output {i}: {_where(wrong.double(), out, wanted, 'native')}"
    return None, ""


def _near(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> Tensor:
    dtype = FP8 if out.dtype == FP8 else dtype
    a, b = out.double(), wanted.double()
    # what overflows in one order of operations may just not do so in another
    top = torch.finfo(out.dtype).max
    a, b = (torch.where(t.abs() > top * (1 - RTOL[dtype]), t.sign() * top, t) for t in (a, b))
    close = (a - b).abs() <= ATOL[dtype] + 2 * RTOL[dtype] * b.abs()
    return close | (a.isnan() & b.isnan())


def _exact(subject: _Subject, case: _Case) -> list[Tensor]:
    with InFloat64():
        return subject.results(subject.op.run_native, widen(case.args))


def _native(subject: _Subject, case: _Case) -> list[Tensor]:
    # oneDNN's gelu makes a NaN of an infinity
    with torch.backends.mkldnn.flags(enabled=False):
        return subject.results(subject.op.run_native, case.args)


def _where(wrong: Tensor, out: Tensor, wanted: Tensor, name: str = "float64") -> str:
    """The worst element: where it is, and the two values there."""
    at = int(torch.where(wrong.isnan(), float("inf"), wrong).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), tuple(wrong.shape))]
    a, b = out.flatten()[at].item(), wanted.flatten()[at].item()
    return f"{a:.6g} at {place}, where {name} has {b:.6g}"


# Tensors and what is known of them


def _mapped(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    mapped: tuple[Any, ...] = tree_map(lambda a: change(a) if isinstance(a, Tensor) else a, args)
    return mapped


def _clone(t: Tensor) -> Tensor:
    """The same elements with the same strides, in memory of their own."""
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    if not t.numel():
        return t.clone()
    memory = t.as_strided((span,), (1,)).clone()
    return memory.as_strided(t.shape, t.stride(), 0)


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if t is not None]


def _property(t: Tensor, what: str) -> Any:
    value = getattr(t, what)
    value = value() if callable(value) else value
    return tuple(value) if what in ("shape", "stride") else getattr(value, "type", value)


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _same(a: Tensor, b: Tensor) -> bool:
    equal = (a == b) | ((a != a) & (b != b))
    return bool(equal.all())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The child process


def serve(request: dict[str, Any]) -> None:
    """Do the jobs of a request, and write a line of JSON for each thing that happens."""
    with os.fdopen(request["fd"], "w", buffering=1) as out:

        def tell(**message: Any) -> None:
            out.write(json.dumps(message) + "\n")

        for module in request["modules"]:
            importlib.import_module(module)
        load_plugins()
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = True
        for number, (op_name, device_type, provider_name, checks) in enumerate(request["jobs"]):
            op = find(op_name)
            assert op is not None
            provider = next(
                p for p in op.providers if (p.device_type, p.name) == (device_type, provider_name)
            )
            for name in checks:
                tell(job=number, check=name)
                try:
                    with torch.set_grad_enabled(name == "opcheck"):
                        for outcome in check(op, provider, name, tell):
                            tell(outcome=dataclasses.asdict(outcome))
                except Exception as error:  # it does not load
                    problem = f"{type(error).__name__}: {error}"
                    tell(outcome=dataclasses.asdict(Outcome(name, "", problem=problem)))
        tell(done=True)
