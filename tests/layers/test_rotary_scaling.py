"""Scaled frequencies and positions in sections, against the code of the models that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compilepass.layers import (
    Llama3Scaling,
    MRotaryEmbedding,
    RotaryEmbedding,
    RotaryScaling,
    YarnScaling,
)

transformers = pytest.importorskip("transformers")

HEAD_DIM, MAX_POSITION = 64, 512


def config(base: float, **rope_parameters: Any) -> Any:
    return transformers.LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": base, **rope_parameters},
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}
DEEPSEEK = {"mscale": 1.5, "mscale_all_dim": 0.8, "beta_fast": 16, "beta_slow": 2}
SCALINGS: dict[str, tuple[RotaryScaling, float, dict[str, Any]]] = {
    "llama3": (Llama3Scaling(), 500000.0, LLAMA3),
    "llama3 of 32": (
        Llama3Scaling(32.0, 2.0, 8.0, 1024),
        1e4,
        {
            **LLAMA3,
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 1024,
        },
    ),
    "yarn": (YarnScaling(16.0, 2048), 1e4, YARN),
    "yarn of a given factor": (
        YarnScaling(16.0, 2048, attention_factor=1.1),
        1e6,
        {**YARN, "attention_factor": 1.1},
    ),
    "yarn as in gpt-oss": (
        YarnScaling(32.0, 4096, truncate=False),
        150000.0,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    "yarn as in DeepSeek": (
        YarnScaling(16.0, 2048, 16.0, 2.0, mscale=1.5, mscale_all_dim=0.8),
        1e4,
        {**YARN, **DEEPSEEK},
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_tables_are_those_of_hugging_face(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, base, parameters = SCALINGS[name]
    theirs = LlamaRotaryEmbedding(config(base, **parameters))
    positions = torch.arange(MAX_POSITION)
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(HEAD_DIM, MAX_POSITION, base, scaling=scaling)
    for mine, wanted in ((ours.cos, cos), (ours.sin, sin)):
        # an angle of 500 has steps of 3e-5
        torch.testing.assert_close(mine, wanted[0, :, : HEAD_DIM // 2], rtol=0, atol=1e-4)


def test_a_scaling_is_told_by_the_op() -> None:
    op = RotaryEmbedding(8, 32, scaling=Llama3Scaling(4.0))
    assert "scaling=Llama3Scaling(factor=4.0" in repr(op)
    assert "scaling" not in repr(RotaryEmbedding(8, 32))


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_vl"])
def test_sections_turn_by_the_positions_that_the_model_takes(model: str) -> None:
    if model == "qwen2_vl":
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig as Config
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding as Theirs
    else:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig as Config
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            Qwen3VLTextRotaryEmbedding as Theirs,
        )
    sections = (12, 10, 10)
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    theirs = Theirs(
        Config(
            hidden_size=4 * HEAD_DIM,
            num_attention_heads=4,
            head_dim=HEAD_DIM,
            rope_parameters=parameters,
        )
    )
    ours = MRotaryEmbedding(
        HEAD_DIM, MAX_POSITION, sections, sections_interleaved=model == "qwen3_vl"
    )
    positions = torch.randint(0, MAX_POSITION, (3, 2, 7))
    heads = torch.randn(2, 7, 4, HEAD_DIM)
    cos, sin = (t.unsqueeze(2) for t in theirs(heads, positions))
    turned, _ = ours(positions, heads, heads)
    half = HEAD_DIM // 2
    crossed = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    torch.testing.assert_close(turned, heads * cos + crossed * sin, rtol=0, atol=1e-4)
