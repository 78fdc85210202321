from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

SEED = 20240607


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    print(f"seed: {SEED}")
    torch.manual_seed(SEED)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
