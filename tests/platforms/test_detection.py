"""Which platform is found, and plugins that bring one."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compilepass.errors import PlatformError, RegistrationError
from compilepass.platforms import (
    FORWARD_METHODS,
    Capabilities,
    CpuPlatform,
    Platform,
    current_platform,
    detection,
    get_platform,
    list_platforms,
    platform_for,
    register_platform,
    unregister_platform,
    use_platform,
)
from compilepass.plugins import broken_plugins, iter_plugins

PLATFORM = """
from compilepass.platforms import Capabilities, Platform
class P(Platform):
    name = {name!r}
    device_type, dispatch_key = "meta", "Meta"
    def is_available(self): return {available}
    def capabilities(self): return Capabilities(isa="none", dtypes=frozenset())
make = lambda: P()
one = P()
"""


class Npu(Platform):
    """Not there by default, as on most machines."""

    name = device_type = "npu_for_tests"
    dispatch_key = "PrivateUse1"

    def is_available(self) -> bool:
        return False

    def capabilities(self) -> Capabilities:
        return Capabilities(isa="npu", dtypes=frozenset({torch.float16}))


class AvailableNpu(Npu):
    name = "available_npu_for_tests"

    def is_available(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _detected_anew() -> Iterator[None]:
    detection._forget()
    yield
    detection._forget()


Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts distributions on sys.path that exist for one test."""
    monkeypatch.delenv("COMPILEPASS_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)

    def make(distribution: str, entry: str, source: str, *, group: str = detection.GROUP) -> str:
        name, _, attribute = entry.partition("=")
        package = distribution.replace("-", "_")
        (tmp_path / f"{package}.py").write_text(source)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        value = f"{package}:{attribute}" if attribute else package
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        return package

    yield make
    for name in set(sys.modules) - modules:
        del sys.modules[name]


# Built-in platforms


def test_the_builtin_platforms_choose_forwards_that_ops_have() -> None:
    builtin = {p.name: p for p in list_platforms()}
    assert {"cpu", "cuda", "rocm", "xpu"} <= builtin.keys()
    assert [builtin[n].forward_method for n in ("cpu", "cuda", "rocm", "xpu")] == [
        "forward_cpu",
        "forward_cuda",
        "forward_hip",
        "forward_xpu",
    ]
    assert all(p.forward_method in FORWARD_METHODS for p in builtin.values())


def test_the_current_platform_is_one_that_is_available() -> None:
    assert current_platform().is_available()
    if not torch.accelerator.is_available():
        assert current_platform().name == "cpu"


def test_the_cpu_says_what_it_can_do() -> None:
    capabilities = get_platform("cpu").capabilities()
    assert capabilities.isa == torch.backends.cpu.get_cpu_capability()
    assert torch.bfloat16 in capabilities.dtypes
    assert capabilities.threads == torch.get_num_threads()
    assert not capabilities.has_triton


def test_a_device_has_its_platform() -> None:
    cpu = get_platform("cpu")
    assert platform_for("cpu") is platform_for(torch.device("cpu")) is cpu
    assert platform_for(torch.ones(1)) is cpu
    assert platform_for("cuda:1").device_type == "cuda"
    with use_platform("rocm"):
        assert platform_for("cuda").name == "rocm"
    with pytest.raises(PlatformError, match="no platform handles the device type 'meta'"):
        platform_for("meta")


def test_use_platform_is_scoped_to_a_with_and_a_thread() -> None:
    seen: list[Platform] = []
    before = current_platform()

    def fail() -> None:
        assert current_platform().name == "xpu"
        thread = threading.Thread(target=lambda: seen.append(current_platform()))
        thread.start()
        thread.join()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), use_platform("xpu"):
        fail()
    assert seen == [before]
    assert current_platform() is before
    with pytest.raises(PlatformError, match="Did you mean 'cuda'"), use_platform("cudaa"):
        pass


# Registered in the process


def test_an_available_platform_that_is_registered_wins_until_it_is_taken_back() -> None:
    before = current_platform()
    register_platform(Npu())
    register_platform(AvailableNpu())
    try:
        assert current_platform().name == "available_npu_for_tests"
        assert get_platform("npu_for_tests") in list_platforms()
        with pytest.raises(PlatformError, match=r"two platforms are called 'npu_for_tests'"):
            register_platform(Npu())
    finally:
        unregister_platform("npu_for_tests")
        unregister_platform("available_npu_for_tests")
    assert current_platform() is before
    with pytest.raises(PlatformError, match="was not registered"):
        unregister_platform("cpu")


def with_attribute(**attributes: Any) -> Platform:
    return type("Odd", (Npu,), attributes)()


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        (Npu, "is not a Platform"),
        ("npu", "is not a Platform"),
        (with_attribute(name=""), "name is ''"),
        (with_attribute(device_type=None), "device_type is None"),
        (with_attribute(forward_method="forward_npu"), "Did you mean 'forward_"),
        (CpuPlatform(), "'compilepass' and 'this process"),
    ],
)
def test_what_is_no_usable_platform_is_refused(platform: Any, message: str) -> None:
    with pytest.raises(PlatformError, match=message):
        register_platform(platform)


# Plugins


@pytest.mark.parametrize("attribute", ["P", "one", "make"])
def test_a_plugin_brings_a_platform(install: Install, attribute: str) -> None:
    install("vendor-a", f"vx={attribute}", PLATFORM.format(name="vx", available=True))
    assert current_platform().name == "vx"
    assert platform_for("meta").name == "vx"


def test_asking_by_name_imports_that_plugin_only(install: Install) -> None:
    wanted = install("vendor-a", "vx=P", PLATFORM.format(name="vx", available=False))
    other = install("vendor-b", "vy=P", PLATFORM.format(name="vy", available=False))
    assert get_platform("vx").name == "vx"
    assert wanted in sys.modules
    assert other not in sys.modules


@pytest.mark.parametrize(
    ("allowed", "found"),
    [("", []), ("vx", ["vx"]), ("vendor-b", ["vy"]), ("vx,vy", ["vx", "vy"])],
)
def test_only_allowed_plugins_load(
    install: Install, monkeypatch: pytest.MonkeyPatch, allowed: str, found: list[str]
) -> None:
    install("vendor-a", "vx=P", PLATFORM.format(name="vx", available=False))
    install("vendor-b", "vy=P", PLATFORM.format(name="vy", available=False))
    monkeypatch.setenv("COMPILEPASS_PLUGINS", allowed)
    assert [p.name for p in list_platforms() if p.name in ("vx", "vy")] == found


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("bad=P", "raise ImportError('no driver')"),
        ("bad=absent", PLATFORM.format(name="bad", available=True)),
        ("bad=P", PLATFORM.format(name="bad", available="1 / 0")),
        ("bad=P", "P = dict"),
    ],
)
def test_a_broken_plugin_is_left_out_with_its_traceback_once(
    install: Install, caplog: pytest.LogCaptureFixture, entry: str, source: str
) -> None:
    distribution = f"broken-{uuid.uuid4().hex}"  # a record of its own in this process
    install(distribution, entry, source)
    for _ in range(2):
        detection._forget()
        assert "bad" not in [p.name for p in list_platforms()]
    assert sum("Traceback" in r.message for r in caplog.records) == 1
    (record,) = [b for b in broken_plugins() if b.distribution == distribution]
    assert (record.name, record.group) == ("bad", "compilepass.platforms")
    assert "Traceback" in record.traceback


def test_two_plugins_of_one_name_are_an_error_that_names_both(install: Install) -> None:
    install("vendor-a", "vx=P", PLATFORM.format(name="vx", available=True))
    install("vendor-b", "vx=P", PLATFORM.format(name="vx", available=True))
    with pytest.raises(PlatformError, match=r"'vendor-.' and 'vendor-.'"):
        current_platform()
    with pytest.raises(PlatformError, match="two plugins"):
        get_platform("vx")


@pytest.mark.parametrize("name", ["cpu", "vx"])
def test_a_plugin_whose_platform_has_a_taken_name_is_an_error(install: Install, name: str) -> None:
    install("vendor-a", "entry_a=P", PLATFORM.format(name=name, available=True))
    install("vendor-b", "entry_b=P", PLATFORM.format(name="vx", available=True))
    with pytest.raises(PlatformError, match="two platforms are called"):
        list_platforms()


def test_other_groups_use_the_same_rules(install: Install) -> None:
    install("vendor-a", "a", "", group="compilepass.ops")
    install("vendor-b", "a", "", group="compilepass.ops")
    with pytest.raises(RegistrationError, match="two plugins are called 'a'"):
        iter_plugins("compilepass.ops")
