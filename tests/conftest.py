"""What all tests share: a cache of their own, but the kernels that the machine has built."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from compilepass.config import cache_dir

# `--hypothesis-profile=thorough` searches on, from a new seed that the first lines show
settings.register_profile(
    "default", deadline=None, max_examples=40, derandomize=True, print_blob=True
)
settings.register_profile("thorough", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A search that is another one each time starts from a seed that can be given again."""
    if config.getoption("hypothesis_profile", None) and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.randrange(2**32))


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("hypothesis_seed", None)
    return [f"--hypothesis-seed={seed}"] if seed is not None else []


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Reports of earlier runs must not answer for this one; a kernel is keyed by all it is of."""
    own = tmp_path_factory.mktemp("cache")
    kernels = cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (own / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILEPASS_CACHE_DIR", str(own))
        yield own
