from __future__ import annotations

import pytest
import torch

SEED = 20240607


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print(f"seed: {SEED}")
    torch.manual_seed(SEED)
