"""Check what a provider computes: against its fake, against float64, against native.

    records = verify("compilepass::rms_norm", "cpp")
    assert all(record.ok for record in records)

The checks run in a process of their own: a kernel that writes where it must not takes that one
down, and its end is a finding like any other. It imports the modules in which the op, the provider
and its examples are defined, so these must be in a module that can be imported, not in a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

from ..errors import KernelError, did_you_mean
from .checks import CHECKS, Outcome
from .examples import examples_of, register_examples
from .registry import KernelOp, Provider, find, kernel_ops, load_plugins

__all__ = ["Record", "register_examples", "verifiable", "verify", "verify_all"]

TIMEOUT = 600.0  # seconds of a check without a word: the first one may build or compile

_CHILD = (
    "import json, sys\n"
    "request = json.loads(sys.stdin.readline())\n"
    "sys.path[:] = request['path']\n"
    "from compilepass.kernels.checks import serve\n"
    "serve(request)\n"
)


@dataclass(frozen=True)
class Record:
    """What one check found of one provider of one op: an :class:`Outcome`, and of whom."""

    op: str
    provider: str
    device: str
    outcome: Outcome

    @property
    def ok(self) -> bool:
        return not self.outcome.problem

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        own = {"op": self.op, "provider": self.provider, "device": self.device, "ok": self.ok}
        return {**own, **vars(self.outcome)}


@dataclass(frozen=True)
class _Job:
    op: KernelOp
    provider: Provider
    checks: tuple[str, ...] = CHECKS

    def record(self, outcome: Outcome) -> Record:
        return Record(self.op.name, self.provider.name, self.provider.device_type, outcome)


def verify(op: str, provider: str | None = None, *, timeout: float = TIMEOUT) -> list[Record]:
    """All records of a provider of ``op``, or of each one that is available on this machine.

    Raises:
        KernelError: there is no such op or provider, it is not available here, the op has no
            examples, or what defines them cannot be imported.
    """
    load_plugins()
    known = find(op)
    if known is None:
        raise KernelError(f"{op} is not a known kernel.", hint=did_you_mean(op, kernel_ops()))
    return list(verify_all(verifiable(known, provider), timeout=timeout))


def verifiable(op: KernelOp, provider: str | None = None) -> list[Provider]:
    """The providers of ``op`` that are available here, or the one that is named.

    Raises :class:`KernelError` where the one that is named cannot be verified, with the reason.
    """
    named = [p for p in op.providers if provider in (None, p.name)]
    reasons = {p: p.available() if p.available else None for p in named}
    usable = [p for p, reason in reasons.items() if reason is None]
    if provider is None:
        return usable
    if not named:
        names = sorted({p.name for p in op.providers})
        raise KernelError(
            f"{op.name} has no provider {provider!r}.", hint=did_you_mean(provider, names)
        )
    if not usable:
        why = "; ".join(f"{p.device_type}: {reason}" for p, reason in reasons.items())
        raise KernelError(f"The provider {provider!r} of {op.name} cannot run here.", why=why)
    return usable


def verify_all(providers: Iterable[Provider], *, timeout: float = TIMEOUT) -> Iterator[Record]:
    """The records of each provider, as they come."""
    jobs = [_Job(_op_of(provider), provider) for provider in providers]
    for job in jobs:
        _check_examples(job.op)
    modules = sorted({module for job in jobs for module in _modules(job)})
    while jobs:
        jobs = yield from _run(jobs, modules, timeout)


def _op_of(provider: Provider) -> KernelOp:
    op = find(provider.op)
    assert op is not None
    return op


def _check_examples(op: KernelOp) -> None:
    if not examples_of(op.name):
        raise KernelError(
            f"{op.name} has no examples to verify it with.",
            hint="Register some where the op is defined: kernels.register_examples(op, "
            "lambda rows, width, dtype: (arguments)).",
        )


def _modules(job: _Job) -> Iterator[str]:
    """The modules whose import defines what a job needs."""
    sources = (
        job.op.native,
        job.op.fake,
        job.provider.load,
        job.provider.supports,
        *examples_of(job.op.name).values(),
    )
    for source in sources:
        if source is None:
            continue
        module = _module_of(source)
        if module == "__main__":
            raise KernelError(
                f"{job.op.name} cannot be verified: a part of it is defined in a script.",
                why="It is verified in a process of its own, which imports what defines it.",
                hint="Move the definitions into a module, and import it.",
            )
        yield module


def _module_of(source: Callable[..., Any]) -> str:
    while hasattr(source, "func"):  # functools.partial
        source = source.func
    return getattr(source, "__module__", None) or type(source).__module__


def _run(
    jobs: list[_Job], modules: list[str], timeout: float
) -> Generator[Record, None, list[_Job]]:
    """The records of one child process; returns the jobs that are left when it ends."""
    with tempfile.TemporaryFile("w+") as output, _Child(jobs, modules, output) as child:
        job, check, case = -1, "", ""
        for message in child.messages(timeout):
            if "done" in message:
                return []
            if "outcome" in message:
                yield jobs[job].record(Outcome(**message["outcome"]))
            if "check" in message:
                job, check, case = message["job"], message["check"], ""
            case = message.get("case", case)
        ended = child.ending()
        if job < 0:
            output.seek(0)
            raise KernelError(
                f"The process that verifies kernels {ended}.",
                why=output.read().strip()[-2000:],
                hint=f"It imports {', '.join(modules)}.",
            )
    problem = f"{case.removeprefix(f'{check}: ') or 'before the first call'}: the process {ended}"
    yield jobs[job].record(Outcome(check, "", problem=problem))
    checks = jobs[job].checks
    rest = () if child.late else checks[checks.index(check) + 1 :]  # one wait a provider is enough
    return [*([replace(jobs[job], checks=rest)] if rest else []), *jobs[job + 1 :]]


class _Child:
    """A process that does jobs and writes what it does, line by line, into a pipe."""

    def __init__(self, jobs: list[_Job], modules: list[str], output: IO[str]) -> None:
        self._read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        self.late = False
        request = {
            "fd": write,
            "path": sys.path,
            "modules": modules,
            "jobs": [(j.op.name, j.provider.device_type, j.provider.name, j.checks) for j in jobs],
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(request) + "\n")

    def messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        """What the process writes, until it ends or writes nothing for ``timeout`` seconds."""
        pending = b""
        while True:
            if not select.select([self._read], [], [], timeout)[0]:
                self.late = True
                return
            received = os.read(self._read, 65536)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            yield from map(json.loads, lines)

    def ending(self) -> str:
        """How the process ended, as the end of a sentence."""
        if self.late:
            return "was stopped, since it did not answer"
        code = self._process.wait()
        if code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
