"""Out-of-tree classes, built wherever a model builds the class that they replace."""

from __future__ import annotations

import torch
from torch import Tensor

from compilepass.layers import LatentCache, MultiHeadLatentAttention, RMSNorm
from compilepass.layers.mla import causal_attention

from . import kernels as kernels  # defines the ops that are called here


@RMSNorm.register_oot
class DemoRMSNorm(RMSNorm):
    """The norm by the package's own kernel op; the native forward is inherited."""

    def forward_oot(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        normed: Tensor = torch.ops.compilepass_demo.rms_norm(total, self.weight, self.eps)
        return normed if residual is None else (normed, total)


@MultiHeadLatentAttention.register_oot
class AbsorbedLatentAttention(MultiHeadLatentAttention):
    """Attends to the latents themselves: ``kv_b`` is applied to the queries and to the result.

    The same function (arXiv:2405.04434, 2.1.2), without expanding the whole cache at every token.
    """

    def attend(self, q_nope: Tensor, q_rope: Tensor, known: LatentCache, *, cached: bool) -> Tensor:
        of_heads = self.kv_b.weight.view(self.num_heads, -1, self.kv_lora_rank)
        to_key, to_value = torch.split(of_heads, [self.nope_dim, self.v_dim], dim=1)
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, to_key), q_rope), dim=-1)
        k = torch.cat((known.latent, known.rope_key), dim=-1)
        k, v = (t.unsqueeze(2).expand(-1, -1, self.num_heads, -1) for t in (k, known.latent))
        scale = (self.nope_dim + self.rope_dim) ** -0.5
        attended = causal_attention(q, k, v, cached=cached, scale=scale)
        return torch.einsum("bthr,hvr->bthv", attended, to_value)
