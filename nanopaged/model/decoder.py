"""One decoder for Llama, Qwen2 and Qwen3.

The three differ in two details (biases, and a norm on q and k), so one file holds them all. The model
works on a flat batch: `num_tokens` tokens of any number of sequences, one after another, without
padding. It has never heard of sequences, blocks or caches: whatever attention needs to know about them
is inside the function `attend` that is passed in.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanopaged.attention.metadata import Attend
from nanopaged.model.layers import Linear, RMSNorm, Rotary, norm_rotate, silu_mul
from nanopaged.model.model_config import ModelConfig


class Attention(nn.Module):
    """q, k, v of the new tokens; what they attend to is `attend`'s business. Adds to `residual`."""

    def __init__(self, config: ModelConfig, layer: int, like: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.heads = [config.num_heads, config.num_kv_heads]
        width = config.num_heads * config.head_dim
        qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, qkv_width, config.qkv_bias, like)
        self.o_proj = Linear(width, config.hidden_size, config.o_bias, like)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, like) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, like) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, residual: Tensor) -> None:
        num_heads, num_kv_heads = self.heads
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        weights = (self.q_norm.weight, self.k_norm.weight) if self.q_norm is not None else None
        qk = norm_rotate(qk, num_heads, weights, self.eps, cos, sin)
        q, k = qk.split(self.heads, dim=1)  # each [num_tokens, its heads, head_dim]
        self.o_proj.add_to(residual, attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    """Adds down(silu(gate(x)) · up(x)) to `residual`, gate and up in one matrix."""

    def __init__(self, config: ModelConfig, like: Tensor) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * inner, config.mlp_bias, like)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, like)

    def forward(self, x: Tensor, residual: Tensor) -> None:
        self.down_proj.add_to(residual, silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm; what comes out of them is added to what came in."""

    def __init__(self, config: ModelConfig, layer: int, like: Tensor) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, like)
        self.self_attn = Attention(config, layer, like)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, like)
        self.mlp = MLP(config, like)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        self.self_attn(self.input_layernorm(x), cos, sin, attend, residual=x)
        self.mlp(self.post_attention_layernorm(x), residual=x)
        return x


class Model(nn.Module):
    """Token ids and positions in, hidden states out; `logits` turns those into scores.

    Args:
        max_positions: the longest sequence that will be seen (the engine's `max_model_len`).
    """

    def __init__(
        self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        like = torch.empty(0, dtype=dtype, device=device)
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(like.new_empty(shape), freeze=True)
        self.rotary = Rotary(config, max_positions, like)
        self.layers = nn.ModuleList(DecoderLayer(config, i, like) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, like)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, like)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids, positions [num_tokens] → hidden states [num_tokens, hidden_size]."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → float32 scores [n, vocab_size]."""
        return self.lm_head(hidden).float()

    def pack(self) -> None:
        """Prepare all linears for this machine's kernels, once the weights are there."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
