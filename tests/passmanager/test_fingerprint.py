"""Same behaviour, same identity; anything that decides the behaviour, another one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch.fx import Graph

import compilepass as cp
from compilepass import inductor, kernels
from compilepass.passmanager import PassManager, fingerprint
from compilepass.passmanager.fingerprint import Unidentified, _Walk
from compilepass.reporting.store import Identity

MODULE = """
import functools
from compilepass import Pass, PassContext, Phase

LIMITS = {"rows": 4}
TARGETS = {"mul", "add", "sub", "div"}
_registry = {}

def first(x): return second(x) + 1
def second(x): return third(x) + 1
@functools.cache
def third(x): return x + FOUR
FOUR = 4

class Base(Pass):
    def helper(self): return 5

class Mine(Base):
    name = "mine"
    phase = Phase.LOWER
    kind = "six"
    rows: int = 7

    def run(self, graph, ctx):
        '''Says what it does.'''
        keep = [lambda x: x + 8, lambda x: x - 9]
        return first(0) + self.helper() + LIMITS["rows"] + len(TARGETS) + self.choose(10)

    @staticmethod
    def choose(x): return x in {"p", "q", "r", "s"}
"""
_names = itertools.count()


def identity(source: str) -> str:
    module = types.ModuleType("edited")
    sys.modules["edited"] = module
    # a file name of its own, since the source is not what counts
    exec(compile(source, f"edited_{next(_names)}.py", "exec"), vars(module))
    return fingerprint(module.Mine())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("second(x) + 1", "second(x) + 2"),
        ("third(x) + 1", "third(x) - 1"),
        ("x + FOUR", "x * FOUR"),
        ("FOUR = 4", "FOUR = 5"),
        ("return 5", "return 6"),
        ('"rows": 4', '"rows": 5'),
        ('"sub", "div"', '"sub"'),
        ("Phase.LOWER", "Phase.FUSE"),
        ('kind = "six"', 'kind = "sept"'),
        ("rows: int = 7", "rows: int = 8"),
        ("x + 8", "x + 9"),
        ("x - 9", "x + 9"),
        ('"p", "q"', '"p", "z"'),
        ("choose(10)", "choose(10.0)"),
    ],
)
def test_a_change_within_reach_is_another_identity(old: str, new: str) -> None:
    assert MODULE.count(old) == 1
    assert identity(MODULE) != identity(MODULE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 5", "return 5  # a comment"),
        ("def first", "\n\n\ndef first"),
        ("_registry = {}", "_registry = {'imported': 'by someone'}"),
        ('{"mul", "add", "sub", "div"}', '{"div", "sub", "add", "mul"}'),
        ("x + FOUR", "(x + FOUR)"),
    ],
)
def test_a_change_without_effect_is_not(old: str, new: str) -> None:
    assert MODULE.count(old) == 1
    assert identity(MODULE) == identity(MODULE.replace(old, new))


def adder(amount: Any) -> Callable[[Any], Any]:
    return lambda x: x + amount


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Record:
    value: Any


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        ([1, [2]], [[1], 2]),
        ((1, 2), [1, 2]),
        ({1: 2}, {2: 1}),
        (torch.float16, torch.bfloat16),
        (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar),
        (Colour.RED, Colour.BLUE),
        (torch.zeros(2000), torch.cat([torch.zeros(1000), torch.ones(1), torch.zeros(999)])),
        (functools.partial(adder, 1), functools.partial(adder, 2)),
    ],
)
@pytest.mark.parametrize("wrap", [lambda v: v, adder, Holder, Slotted, Record])
def test_values_are_told_apart_wherever_they_are_held(a: Any, b: Any, wrap: Any) -> None:
    assert fingerprint(wrap(a)) == fingerprint(wrap(a))
    assert fingerprint(wrap(a)) != fingerprint(wrap(b))


def test_which_of_two_things_comes_again_counts() -> None:
    one, two = adder(1), adder(2)
    assert fingerprint([one, two, one]) != fingerprint([one, two, two])


def test_a_structure_that_holds_itself_ends() -> None:
    holder, loop = Holder(None), []  # type: ignore[var-annotated]
    holder.value = holder
    loop.append(loop)
    assert len(fingerprint(holder, loop)) == 64


def test_no_address_gets_in() -> None:
    from torch._inductor.pattern_matcher import (
        Arg,
        CallFunction,
        PatternMatcherPass,
        register_graph_pattern,
    )

    def matcher() -> Any:
        made = PatternMatcherPass(pass_name="doubles")
        pattern = CallFunction(torch.ops.aten.mul.Tensor, Arg(), 2)
        register_graph_pattern(pattern, pass_dict=made)(on_match)
        return made

    things = (Holder(object()), [object()], torch.nn.Linear(2, 2), print, Graph(), re.compile("a"),
              torch.Generator(), iter([]), matcher())  # fmt: skip
    for thing in things:
        parts = "\n".join(_Walk().parts(thing))
        assert not re.search(r"0x[0-9a-f]{6,}", parts), parts
    assert fingerprint(matcher()) == fingerprint(matcher())


def on_match(match: Any, x: Any) -> None: ...


class WithUuid:
    def __init__(self, uuid: Any) -> None:
        self._uuid = uuid

    def uuid(self) -> Any:
        return self._uuid

    def __call__(self, graph: Graph) -> None: ...


def test_an_inductor_pass_is_its_uuid() -> None:
    assert fingerprint(WithUuid("a")) == fingerprint(WithUuid("a"))
    assert fingerprint(WithUuid("a")) != fingerprint(WithUuid("b"))
    with pytest.raises(Unidentified):
        fingerprint(WithUuid(None))


# The uuid of a plan


def uuid(*registered: Any, device: str = "cpu", **fields: Any) -> str | None:
    config = cp.CompilationConfig(**fields)
    for pass_like in registered:
        config.register_pass(pass_like)
    factors = PassManager(cp.plan(config), inductor.engine()).factors(device)
    return None if factors is None else Identity({**factors, **config.factors()}).key


def test_the_uuid_follows_the_policies() -> None:
    words = [
        ["none"],
        ["none", "+fuse_norm_quant"],
        ["default"],
        ["default", "-fuse_norm_quant"],
    ]
    assert len({uuid(passes=w) for w in words}) == len(words)
    assert uuid(custom_ops=["none"]) != uuid(custom_ops=["none", "+rms_norm"])
    assert uuid(passes=["-clean_up", "-fuse_act_quant"]) == uuid(
        passes=["-fuse_act_quant", "-clean_up"]
    )


def test_the_uuid_follows_options_and_closures_of_registered_passes() -> None:
    class Tuned(cp.Pass):
        name = "tuned"
        rows: int = 1

    assert uuid(Tuned(rows=1)) == uuid(Tuned())
    assert uuid(Tuned(rows=1)) != uuid(Tuned(rows=2))
    assert uuid(adder(1)) == uuid(adder(1))
    assert uuid(adder(1)) != uuid(adder(2))
    assert uuid(WithUuid("a")) != uuid(WithUuid("b"))


def test_a_pass_without_identity_leaves_the_plan_without_one() -> None:
    assert uuid(WithUuid(None)) is None


def test_the_uuid_follows_the_versions_and_providers_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = uuid()
    op = kernels.find("compilepass::fused_add_rms_norm")
    assert op is not None
    newer = dataclasses.replace(op, version=op.version + 1)
    module = "compilepass.passmanager.identity.find"
    monkeypatch.setattr(module, lambda k: newer if k == op.name else kernels.find(k))
    assert uuid() != before


@pytest.mark.slow
def test_the_uuid_is_the_same_in_all_processes_whatever_they_imported_before() -> None:
    """Not compared with this process: pytest rewrites the assert statements of the package."""
    script = textwrap.dedent("""
        {}
        import compilepass as cp
        from compilepass import inductor
        from compilepass.passmanager import PassManager
        from compilepass.reporting.store import Identity
        config = cp.CompilationConfig(passes=["all"])
        factors = PassManager(cp.plan(config), inductor.engine()).factors("cpu")
        print(Identity(factors).with_factors(config.factors()).key)
    """)
    imports = (
        "import compilepass.layers, torch._inductor.compile_fx",
        "import compilepass.passes.utility.noops, compilepass.rewrite, numpy",
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script.format(first)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, first in enumerate(imports, 1)
    ]
    first, second = (process.communicate()[0].strip() for process in running)
    assert first == second
    assert len(first) == 64
