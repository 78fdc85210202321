"""The configuration: its grammar, its errors, where it comes from and how long it is active."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compilepass import config as module
from compilepass.config import (
    CompilationConfig,
    CompilationMode,
    RegisteredPass,
    config_is_default,
    get_config,
    set_default_config,
    use_config,
)
from compilepass.errors import ConfigError

# The grammar


@pytest.mark.parametrize("field", ["custom_ops", "passes"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all", "none"], "two bases, 'all' and 'none'"),
        (["+x", "-x"], r"both '\+x' and '-x'"),
        (["x"], "neither a base nor a signed name"),
        ([""], "neither a base nor a signed name"),
        (["+"], "'' is not a name"),
        (["- x"], "' x' is not a name"),
        (["+a+b"], "is not a name"),
        (["+1"], "is not a name"),
        ([3], "not a string"),
        ([None], "not a string"),
        (3, "not a list of words"),
        (None, "not a list of words"),
        ("none,,+x", "neither a base nor a signed name"),
        ("+x{a=1", "does not end"),
        (["-x{a=1}"], "cannot take options"),
    ],
)
def test_what_the_grammar_refuses(field: str, words: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompilationConfig(**{field: words})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+x{a}", "malformed option"),
        ("+x{a=}", "malformed option"),
        ("+x{=1}", "malformed option"),
        ("+x{a=1,a=1}", "malformed option"),
        ("+x{a=1,}", "malformed option"),
        ("+x{a=1 2}", "malformed value"),
        ("+x{a=$}", "malformed value"),
        ("+x{a=1}y", "neither a base"),
    ],
)
def test_malformed_options_are_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompilationConfig(passes=[word])


def test_options_are_literals_and_bare_words() -> None:
    text = "default, +x{i=1, f=1.5, t=true, p=False, s='a,b}', q=\"c\", w=rows, l=[1, 2]}, -y"
    policy = CompilationConfig(passes=text).pass_policy()
    assert policy.enabled == {
        "x": {
            "i": 1,
            "f": 1.5,
            "t": True,
            "p": False,
            "s": "a,b}",
            "q": "c",
            "w": "rows",
            "l": [1, 2],
        }
    }
    assert policy.disabled == {"y"}


def test_options_belong_to_passes_only_and_have_one_value() -> None:
    with pytest.raises(ConfigError, match="cannot take options"):
        CompilationConfig(custom_ops=["+x{a=1}"])
    with pytest.raises(ConfigError, match="to 1 and 2"):
        CompilationConfig(passes=["+x{a=1}", "+x{a=2}"])
    merged = CompilationConfig(passes=["+x{a=1}", "+x", "+x{b=2}"]).pass_policy()
    assert merged.enabled == {"x": {"a": 1, "b": 2}}


def assign(words: list[str]) -> None:
    words[0] = "-x"


def assign_slice(words: list[str]) -> None:
    words[0:1] = ["-x", "all"]


def add_in_place(words: list[str]) -> None:
    words += ["-x"]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.append("-x"),
        lambda w: w.extend(["+y", "all"]),
        lambda w: w.insert(0, "bad"),
        assign,
        assign_slice,
        add_in_place,
        lambda w: w.append(3),
        lambda w: w.remove("+absent"),
        lambda w: w.pop(9),
    ],
)
def test_a_bad_change_leaves_the_list_as_it_was(change: Callable[[Any], None]) -> None:
    config = CompilationConfig(custom_ops=["none", "+x"])
    with pytest.raises((ConfigError, ValueError, IndexError)):
        change(config.custom_ops)
    assert config.custom_ops == ["none", "+x"]
    assert config.op_policy().enabled.keys() == {"x"}


def test_good_changes_take_effect() -> None:
    config = CompilationConfig()
    words = config.custom_ops
    words.append("all")
    assert config.op_policy().base == "all"
    words[0] = "none"
    assert config.op_policy().base == "none"
    words += ["+x", "+x"]
    words.extend("+y, -z")
    words.insert(0, "+first")
    assert config.op_policy().names == {"x", "y", "z", "first"}
    assert words.pop() == "-z"
    words.remove("none")
    del words[0]
    assert words == ["+x", "+x", "+y"]
    words *= 2
    words.clear()
    assert config.op_policy().names == frozenset()
    config.custom_ops = "none,+x"  # type: ignore[assignment]
    config.custom_ops += ["+y"]
    assert config.custom_ops == ["none", "+x", "+y"]
    with pytest.raises(ConfigError):
        config.custom_ops = ["all", "none"]
    assert config.custom_ops == ["none", "+x", "+y"]


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        ({}, "none"),
        ({"mode": "none"}, "all"),
        ({"mode": "stock_torch_compile"}, "none"),
        ({"backend": "fx"}, "all"),
        ({"backend": "eager"}, "all"),
        ({"custom_ops": "all"}, "all"),
        ({"custom_ops": "none", "backend": "fx"}, "none"),
    ],
)
def test_the_base_of_custom_ops(fields: dict[str, Any], base: str) -> None:
    assert CompilationConfig(**fields).op_policy().base == base


def test_the_policy_follows_mode_and_backend_when_they_change() -> None:
    config = CompilationConfig()
    assert config.op_policy().base == "none"
    config.backend = "fx"
    assert config.op_policy().base == "all"


def test_the_reason_names_the_word_the_base_or_the_default() -> None:
    config = CompilationConfig(custom_ops=["+a", "-b"])
    policy = config.op_policy()
    assert [policy.why(n, False) for n in "abc"] == [
        "'+a' in custom_ops",
        "'-b' in custom_ops",
        "no base: 'none' because the config compiles with Inductor",
    ]
    passes = CompilationConfig(level=2).pass_policy()
    assert passes.why("x", True) == "on by default (level=2 means 'default')"
    assert (passes.decide("x", True), passes.decide("x", False)) == (True, False)
    assert CompilationConfig(passes="all").pass_policy().why("x", False) == "base 'all' in passes"


def test_levels_say_what_the_base_default_means() -> None:
    bases = [CompilationConfig(level=level).pass_policy().base for level in (0, 1, 2, 3, None)]
    assert bases == ["none", "canonical", "default", "all", "default"]
    with pytest.raises(ConfigError, match="base 'none', and level is 3"):
        CompilationConfig(passes=["none"], level=3)
    config = CompilationConfig(passes=["none"])
    with pytest.raises(ConfigError, match="level is 3"):
        config.level = 3
    assert config.level is None


# Fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"custom_opps": []}, r"unknown field 'custom_opps'[^$]*Did you mean 'custom_ops'"),
        ({"mode": "compile_with_pases"}, "Did you mean 'COMPILE_WITH_PASSES'"),
        ({"mode": 3}, "mode is 3"),
        ({"level": 4}, "level is 4"),
        ({"level": -1}, "level is -1"),
        ({"backend": ""}, "backend is ''"),
        ({"expect": {"x": -1}}, "expect.x is -1"),
        ({"dynamic": "perhaps"}, "dynamic is 'perhaps'"),
        ({"strict": "perhaps", "levle": 1}, "strict is 'perhaps'.*unknown field 'levle'"),
    ],
)
def test_a_wrong_field_is_a_config_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompilationConfig(**fields)
    with pytest.raises(ConfigError, match=message):
        CompilationConfig.model_validate(fields)
    config = CompilationConfig()
    for name, value in fields.items():
        with pytest.raises(ConfigError):
            setattr(config, name, value)
    assert config == CompilationConfig()


@pytest.mark.parametrize(
    "mode", [2, "2", "COMPILE_WITH_PASSES", "compile_with_passes", CompilationMode(2)]
)
def test_modes_load_from_names_and_numbers(mode: Any) -> None:
    assert CompilationConfig(mode=mode).mode is CompilationMode.COMPILE_WITH_PASSES


def test_registered_passes() -> None:
    config = CompilationConfig()
    config.register_pass(print, after="fuse_a", before=["fuse_b", "fuse_c"])
    assert config.extra_passes == (RegisteredPass(print, ("fuse_b", "fuse_c"), ("fuse_a",)),)
    assert config != CompilationConfig()
    for wrong in (3, [3], [""], None):
        with pytest.raises(ConfigError, match="is not a pass name"):
            config.register_pass(print, before=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got None"):
        config.register_pass(None)


def test_copies_are_independent_and_equal() -> None:
    config = CompilationConfig(custom_ops=["none"], expect={"x": 1})
    config.register_pass(print)
    config.count_op("x", True)
    for twin in (copy.copy(config), copy.deepcopy(config), config.model_copy()):
        assert twin == config
        assert twin.enabled_custom_ops == {}
        twin.custom_ops.append("+x")
        twin.expect["y"] = 2
        twin.register_pass(len)
    assert config.custom_ops == ["none"]
    assert config.expect == {"x": 1}
    assert len(config.extra_passes) == 1
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError):
        config.model_copy(update={"custom_ops": ["all", "none"]})


def test_counters_do_not_count_for_equality() -> None:
    config = CompilationConfig()
    config.count_op("x", True)
    config.count_op("y", False)
    assert (config.enabled_custom_ops, config.disabled_custom_ops) == ({"x": 1}, {"y": 1})
    assert config == CompilationConfig()


def test_the_fingerprint_covers_behaviour_only() -> None:
    def fingerprint(**fields: Any) -> str:
        return CompilationConfig(**fields).fingerprint()

    base = fingerprint()
    same: list[dict[str, Any]] = [
        {"debug_dump_path": "x"},
        {"expect": {"x": 1}},
        {"strict": True},
        {"custom_ops": ["none"]},
        {"level": 2},
        {"passes": []},
    ]
    assert {fingerprint(**fields) for fields in same} == {base}
    words = ["none", "+a", "+b", "-c"]
    assert fingerprint(custom_ops=words) == fingerprint(custom_ops=[*reversed(words), "+a"])
    different: list[dict[str, Any]] = [
        {"custom_ops": ["all"]},
        {"custom_ops": ["+a"]},
        {"passes": ["-a"]},
        {"passes": ["+a"]},
        {"passes": ["+a{x=1}"]},
        {"level": 0},
        {"dynamic": True},
        {"backend": "fx"},
        {"mode": 1},
        {"fullgraph": True},
        {"inductor_options": {"a": 1}},
        {"kernel_providers": {"rms_norm": "native"}},
        {"use_inductor_graph_partition": True},
    ]
    assert len({fingerprint(**fields) for fields in different} | {base}) == len(different) + 1
    registered = CompilationConfig()
    registered.register_pass(print)
    assert registered.fingerprint() != base


# Text

FULL: dict[str, Any] = {
    "mode": "stock_torch_compile",
    "dynamic": True,
    "custom_ops": ["none", "+a"],
    "passes": ["default", "+b{x='q\"', y=1}"],
    "level": 3,
    "expect": {"a b": 2},
    "debug_dump_path": "dump/é",
    "inductor_options": {"x.y": [1, 2.5, True, "s"], "n": {"k": 1e30}},
}


def test_toml_and_json_round_trip(tmp_path: Path) -> None:
    for fields in ({}, FULL):
        config = CompilationConfig(**fields)
        toml, as_json = tmp_path / "c.toml", tmp_path / "c.json"
        toml.write_text(config.to_toml(), encoding="utf-8")
        as_json.write_text(config.model_dump_json(), encoding="utf-8")
        assert CompilationConfig.load(toml) == config
        assert CompilationConfig.load(as_json) == config


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.floats(-9, 9)))
def test_any_option_round_trips_through_toml(options: dict[str, Any]) -> None:
    text = CompilationConfig(inductor_options=options).to_toml()
    assert module.CompilationConfig(**_loads(text)).inductor_options == options


def _loads(text: str) -> dict[str, Any]:
    from compilepass.config_files import tomllib

    return tomllib.loads(text)


def test_any_toml_may_have_the_table_of_a_pyproject(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('[tool.compilepass]\nbackend = "fx"\n')
    assert CompilationConfig.load(path).backend == "fx"


def test_pyproject_has_a_table_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text('[tool.compilepass]\ncustom_ops = ["all"]\n')
    assert CompilationConfig.load(path) == CompilationConfig(custom_ops=["all"])
    path.write_text("[tool.other]\n")
    with pytest.raises(ConfigError, match=r"no \[tool\.compilepass\]"):
        CompilationConfig.load(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "mode = ", "cannot parse"),
        ("c.json", "{", "cannot parse"),
        ("c.json", "[1]", "holds list"),
        ("c.yaml", "mode: 1", "neither '.toml' nor '.json'"),
        ("c.toml", "modee = 1", "Did you mean 'mode'"),
        ("absent.toml", None, "cannot read"),
    ],
)
def test_a_bad_file_is_a_config_error(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        CompilationConfig.load(tmp_path / name)


def test_what_toml_cannot_say_is_an_error_but_str_never_is() -> None:
    config = CompilationConfig(inductor_options={"hook": print}, custom_ops=["all"])
    with pytest.raises(ConfigError, match=r"inductor_options\.hook"):
        config.to_toml()
    assert str(config) == (
        f"CompilationConfig(custom_ops=['all'], inductor_options={{'hook': {print!r}}})"
    )


# The environment


def test_every_field_is_read_from_the_environment() -> None:
    config = CompilationConfig(**FULL)
    environ = {
        "COMPILEPASS_MODE": "Stock_Torch_Compile",
        "COMPILEPASS_DYNAMIC": "1",
        "COMPILEPASS_CUSTOM_OPS": "none, +a",
        "COMPILEPASS_PASSES": json.dumps(FULL["passes"]),
        "COMPILEPASS_LEVEL": "3",
        "COMPILEPASS_EXPECT": '{"a b": 2}',
        "COMPILEPASS_DEBUG_DUMP_PATH": "dump/é",
        "COMPILEPASS_INDUCTOR_OPTIONS": json.dumps(FULL["inductor_options"]),
        "COMPILEPASS_CACHE_DIR": "reserved",
        "OTHER": "x",
    }
    assert CompilationConfig.from_env(environ=environ) == config
    unset = {"COMPILEPASS_LEVEL": "", "COMPILEPASS_PASSES": ""}
    changed = CompilationConfig.from_env(config, unset)
    assert (changed.level, changed.passes, changed.expect) == (None, [], config.expect)
    assert config.level == 3


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("COMPILEPASS_CUSTOM_OP", "none", "Did you mean 'COMPILEPASS_CUSTOM_OPS'"),
        ("COMPILEPASS_CACHEDIR", "x", "Did you mean 'COMPILEPASS_CACHE_DIR'"),
        ("COMPILEPASS_EXPECT", "{", "not JSON"),
        ("COMPILEPASS_CUSTOM_OPS", "all,none", "two bases"),
        ("COMPILEPASS_LEVEL", "many", "level is 'many'"),
    ],
)
def test_a_bad_variable_is_a_config_error(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompilationConfig.from_env(environ={variable: value})


def test_the_other_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CACHE_DIR", "PLUGINS", "CXX", "NO_CPP"):
        monkeypatch.delenv(f"COMPILEPASS_{name}", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert module.cache_dir() == Path.home() / ".cache" / "compilepass"
    assert (module.plugin_allowlist(), module.cxx(), module.cpp_disabled()) == (None, None, False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_dir() == tmp_path / "compilepass"
    monkeypatch.setenv("COMPILEPASS_CACHE_DIR", str(tmp_path / "own"))
    assert module.cache_dir() == tmp_path / "own"
    monkeypatch.setenv("COMPILEPASS_PLUGINS", "")
    assert module.plugin_allowlist() == ()
    monkeypatch.setenv("COMPILEPASS_PLUGINS", "a, b")
    assert module.plugin_allowlist() == ("a", "b")
    monkeypatch.setenv("CXX", "g++")
    assert module.cxx() == "g++"
    monkeypatch.setenv("COMPILEPASS_CXX", "clang++")
    assert module.cxx() == "clang++"
    for value, disabled in (("1", True), ("yes", True), ("0", False), ("false", False)):
        monkeypatch.setenv("COMPILEPASS_NO_CPP", value)
        assert module.cpp_disabled() is disabled


# The active configuration


def fail_unless(holds: bool) -> None:
    assert holds
    raise ZeroDivisionError


def test_scopes_nest_and_survive_errors() -> None:
    outer, inner = CompilationConfig(level=1), CompilationConfig(level=2)
    assert config_is_default()
    with use_config(outer) as used:
        assert used is outer is get_config()
        with pytest.raises(ZeroDivisionError), use_config(inner):
            fail_unless(get_config() is inner)
        assert get_config() is outer
        assert not config_is_default()
    assert config_is_default()
    with pytest.raises(ConfigError, match="not a CompilationConfig"), use_config({}):  # type: ignore[arg-type]
        pass


def test_a_scope_holds_in_its_own_thread_only() -> None:
    seen: list[bool] = []
    with use_config(CompilationConfig()):
        thread = threading.Thread(target=lambda: seen.append(config_is_default()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_the_default_comes_from_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setenv("COMPILEPASS_LEVEL", "3")
        set_default_config(None)
        assert get_config().level == 3
        assert get_config() is get_config()
        mine = CompilationConfig(level=0)
        set_default_config(mine)
        assert get_config() is mine
        with pytest.raises(ConfigError):
            set_default_config("none")  # type: ignore[arg-type]
    finally:
        set_default_config(None)
