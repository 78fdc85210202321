"""One change is one factor of a graph's identity, and the command that names it."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import compilepass as cp
from compilepass import kernels
from compilepass.cli import app
from compilepass.platforms import use_platform
from compilepass.reporting.store import Difference, Stored, differences, stored

SOURCE = """
import compilepass as cp

def first(x): return second(x)
def second(x): return third(x)
def third(x): return x + 1

class Mine(cp.Pass):
    name = "mine"
    rows: int = 1

    def run(self, graph, ctx):
        first(1)
        return 0
"""

Change = Callable[[pytest.MonkeyPatch], dict[str, Any]]


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built kernels are taken from where they are; reports go to a folder of the test's."""
    from compilepass.reporting import store

    monkeypatch.setattr(store, "_folder", lambda: tmp_path / "reports")


def mine(source: str = SOURCE, **options: Any) -> Any:
    module = types.ModuleType("package_of_the_test")
    sys.modules[module.__name__] = module
    exec(compile(source, "package_of_the_test.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__["Mine"](**options)


def closing_over(value: int) -> Callable[[Any], None]:
    def over(graph: Any) -> None:
        _ = value

    return over


def identity_of(pass_like: Any = None, **fields: Any) -> Stored:
    """Compile a function and return what was stored for it last."""
    torch._dynamo.reset()
    before = {entry.key for entry in stored()}
    config = cp.CompilationConfig(**{"backend": "fx", "custom_ops": ["none"], **fields})
    config.register_pass(pass_like if pass_like is not None else mine())
    with torch.no_grad():
        cp.compile(lambda x: torch.relu(x) + 1, config)(torch.ones(3))
    new = [entry for entry in stored() if entry.key not in before]
    return new[0] if new else next(stored())


def with_newer_kernel(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    op = kernels.find("compilepass::rms_norm")
    assert op is not None
    newer = dataclasses.replace(op, version=op.version + 1)
    find = kernels.find
    patch.setattr(
        "compilepass.passmanager.identity.find", lambda k: newer if k == op.name else find(k)
    )
    return {}


def with_another_torch(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(torch, "__version__", "9.9.9")
    return {}


CHANGES: dict[str, tuple[Change, str]] = {
    "a helper three calls away": (
        lambda _: {"pass_like": mine(SOURCE.replace("x + 1", "x + 2"))},
        "pass mine",
    ),
    "an option": (lambda _: {"pass_like": mine(rows=2)}, "pass mine, option rows"),
    "a policy word of the ops": (
        lambda _: {"custom_ops": ["none", "+rms_norm"]},
        "config.custom_ops",
    ),
    "an option of Inductor": (
        lambda _: {"inductor_options": {"max_autotune": True}},
        "config.inductor_options.max_autotune",
    ),
    "a kernel's version": (with_newer_kernel, "kernel compilepass::rms_norm"),
    "the torch version": (with_another_torch, "torch"),
    "the partition": (
        lambda _: {"use_inductor_graph_partition": True},
        "config.use_inductor_graph_partition",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_is_one_factor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, factor = CHANGES[name]
    before = identity_of()
    after = identity_of(**change(monkeypatch))
    found = differences(before.identity, after.identity)
    assert [d.factor for d in found] == [factor]
    assert before.key != after.key


def test_a_closure_value_is_one_factor() -> None:
    before, after = identity_of(closing_over(1)), identity_of(closing_over(2))
    assert [d.factor for d in differences(before.identity, after.identity)] == ["pass over"]


def test_a_pass_that_is_switched_off_is_missing_with_its_kernels() -> None:
    before, after = identity_of(), identity_of(passes=["-fuse_rope"])
    found = [d for d in differences(before.identity, after.identity) if d.other is None]
    assert [d.factor for d in found] == ["pass fuse_rope", "kernel compilepass::rotate"]


def test_the_platform_decides_which_kernels_run() -> None:
    before = identity_of()
    with use_platform("cuda"):
        after = identity_of()
    names = {d.factor.split()[0] for d in differences(before.identity, after.identity)}
    assert names <= {"kernel", "config.custom_ops"}


@pytest.mark.parametrize(
    "fields",
    [
        {"passes": ["+eliminate_noops", "-fuse_rope"]},
        {"passes": ["-fuse_rope", "+eliminate_noops"]},
        {"passes": ["-fuse_rope"], "expect": {"fuse_act_and_mul": 0}},
    ],
)
def test_what_does_not_matter_is_no_miss(fields: dict[str, Any]) -> None:
    base = identity_of(passes=["-fuse_rope"])
    found = differences(base.identity, identity_of(**fields).identity)
    assert [d.factor for d in found if not d.factor.startswith("config.passes")] == []


def test_the_order_of_policy_words_is_no_miss() -> None:
    one = identity_of(passes=["-fuse_rope", "-clean_up"])
    assert one.key == identity_of(passes=["-clean_up", "-fuse_rope"]).key


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["cache", *words])


def test_the_command_names_the_factor() -> None:
    one, other = identity_of(), identity_of(pass_like=mine(rows=2))
    said = run("explain", one.key[:10], other.key[:10], "--json")
    assert said.exit_code == 0
    assert json.loads(said.stdout) == [
        {"factor": "pass mine, option rows", "one": "1", "other": "2"}
    ]
    assert "pass mine, option rows" in run("explain", one.key, other.key).stdout
    assert "nothing differs" in run("explain", one.key, one.key).stdout


def test_the_list_shows_graphs_and_clear_removes_them() -> None:
    assert "No graph is stored" in run("list").stdout
    entry = identity_of()
    listed = json.loads(run("list", "--json").stdout)
    assert [e["key"] for e in listed] == [entry.key]
    assert entry.key[:12] in run("list").stdout


@pytest.mark.parametrize("key", ["no", "0123456789"])
def test_a_key_that_is_not_there_is_an_error_that_says_how_to_find_one(key: str) -> None:
    said = run("explain", key, key)
    assert said.exit_code == 2


def test_a_factor_that_only_one_side_has_is_told() -> None:
    one, other = identity_of(), identity_of(passes=["none", "+mine"])
    assert Difference("pass clean_up", one.identity.factors["pass clean_up"], None) in differences(
        one.identity, other.identity
    )
