"""Models of the transformers library, two layers each with random weights: what they come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .capture import compiled

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
}
MODELS = {
    "Llama": {"rms_norm": 1, "fused_add_rms_norm": 4, "silu_mul": 2, "rotate": 4},
    # norms after attention and feed-forward too: half of them follow no addition
    "Gemma2": {"rms_norm": 5, "fused_add_rms_norm": 4, "gelu_mul": 2, "rotate": 4},
}


SIZES = {"GPTJ": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}}


def kernels_of(family: str, dynamic: bool) -> dict[str, int]:
    """The kernels that a model of this family calls; its results are checked on the way."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **SIZES.get(family, {})})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().bfloat16()
    ids = torch.randint(0, SMALL["vocab_size"], (2, 8))

    def logits(ids: torch.Tensor) -> Any:
        return model(input_ids=ids, use_cache=False).logits

    with torch.no_grad():
        done = compiled(logits, (ids,), dynamic=dynamic)
        eager = logits(ids)
    assert done.changes_again == 0
    torch.testing.assert_close(done.result, eager, rtol=0, atol=0.05)
    return done.kernels


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", MODELS)
def test_model_reaches_its_kernels(family: str, dynamic: bool) -> None:
    assert kernels_of(family, dynamic) == MODELS[family]


# two halves, a part of them, neighbours, and neighbours in float
ROTARY = ("GPTNeoX", "Phi", "Glm", "GPTJ", "Cohere")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", ROTARY)
def test_queries_and_keys_of_a_model_are_rotated_by_the_kernel(family: str, dynamic: bool) -> None:
    assert kernels_of(family, dynamic)["rotate"] == 4
