"""One decoder for Llama, Qwen2 and Qwen3, which differ only in biases and in a norm of q and k.

The model computes a flat batch: `num_tokens` tokens of any number of sequences, end to end, without padding.
It knows no sequences, blocks or caches: the `attention` that is passed in knows them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from nanopaged.model.layers import MLP, PLAIN, Linear, Operations, RMSNorm, Rotary, empty_weight
from nanopaged.model.model_config import ModelConfig
from nanopaged.parallel import Ranks

AttentionFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention(layer, q, k, v) → out, with q, out [num_tokens, num_heads, head_dim] and k, v [num_tokens,
num_kv_heads, head_dim]. A backend of `nanopaged.attention` is one."""


class SelfAttention(nn.Module):
    """q, k, v of the new tokens, attention over the KV cache, and the output projection."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks | None, operations: Operations) -> None:
        super().__init__()
        self.layer, self.head_dim, self.eps = layer, config.head_dim, config.rms_norm_eps
        self.norm_rotate, self.heads = operations.norm_rotate, [config.num_heads, config.num_kv_heads]
        width = config.num_heads * config.head_dim
        qkv_width = width + 2 * config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, qkv_width, config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, config.o_bias, ranks)
        self.q_norm = RMSNorm(config.head_dim, self.eps, operations) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, self.eps, operations) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        num_heads, num_kv_heads = self.heads
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        weights = (self.q_norm.weight, self.k_norm.weight) if self.q_norm and self.k_norm else None
        qk = self.norm_rotate(qk, num_heads, weights, self.eps, cos, sin)
        q, k = qk.split(self.heads, dim=1)  # each [num_tokens, its heads, head_dim]
        return self.o_proj(attention(self.layer, q, k, v).flatten(1))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks | None, operations: Operations) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
        self.self_attn = SelfAttention(config, layer, ranks, operations)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
        self.mlp = MLP(config, ranks, operations)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Token ids and positions in, hidden states out; `logits` turns hidden states into scores.

    It is made without memory for its weights: `load_model` gives them memory and values.

    Args:
        ranks: the ranks that share the model; None if this is all of it.
        operations: the functions that compute the small operations of all layers.
    """

    def __init__(
        self, config: ModelConfig, ranks: Ranks | None = None, operations: Operations = PLAIN
    ) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.share = share = config.share(ranks.size if ranks is not None else 1)  # this rank's layers
        num_rows = share.vocab_size  # the last rank may have some too many
        self.embed_tokens = nn.Embedding.from_pretrained(empty_weight(num_rows, config.hidden_size))
        self.rotary = Rotary()
        layers = [DecoderLayer(share, i, ranks, operations) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
        self.lm_head = Linear(config.hidden_size, num_rows, False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionFn) -> Tensor:
        """input_ids, positions [num_tokens] → hidden states [num_tokens, hidden_size]."""
        x = self.embed_tokens(input_ids) if self.ranks is None else self._embed_share(input_ids, self.ranks)
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.norm(x)

    def _embed_share(self, input_ids: Tensor, ranks: Ranks) -> Tensor:
        """Embeddings of the tokens whose rows this rank has, added to those of the other ranks."""
        num_rows = self.embed_tokens.num_embeddings
        rows = input_ids - ranks.rank * num_rows
        elsewhere = (rows < 0) | (rows >= num_rows)
        x = self.embed_tokens(rows.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
        return ranks.all_reduce(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → float32 scores [n, vocab_size]; of ranks above 0, only their columns.

        Those of Apple's GPU are fetched: draws add up probabilities in float64, which it has not.
        """
        scores = self.lm_head(hidden).float()
        if self.ranks is not None:
            return self.ranks.gather(scores)[:, : self.config.vocab_size]
        return scores.cpu() if scores.device.type == "mps" else scores
