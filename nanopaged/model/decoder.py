"""One decoder for Llama, Qwen2 and Qwen3.

The three differ only in biases and in a norm of q and k, so one file serves all of them. The model computes a
flat batch: `num_tokens` tokens of any number of sequences, end to end, without padding. It knows no
sequences, blocks or caches: the `attention` that is passed in knows them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor, nn

from nanopaged.kernels.devices import sampling_device
from nanopaged.model.layers import MLP, Linear, Operations, Part, RMSNorm, Rotary, empty_weight
from nanopaged.model.model_config import ModelConfig
from nanopaged.model.parallel import Ranks

logger = logging.getLogger("nanopaged")

AttentionFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention(layer, q, k, v) → out, with q, out [num_tokens, num_heads, head_dim] and k, v [num_tokens,
num_kv_heads, head_dim]. A backend of `nanopaged.attention` is one."""


class SelfAttention(Part):
    """q, k, v of the new tokens, attention over the KV cache, and the output projection."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks | None) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.heads = [config.num_heads, config.num_kv_heads]
        width = config.num_heads * config.head_dim
        qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, qkv_width, config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, config.o_bias, ranks)
        self.q_norm = RMSNorm(config.head_dim, self.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, self.eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        num_heads, num_kv_heads = self.heads
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        weights = None
        if self.q_norm is not None and self.k_norm is not None:
            weights = self.q_norm.weight, self.k_norm.weight
        qk = self.operations.norm_rotate(qk, num_heads, weights, self.eps, cos, sin)
        q, k = qk.split(self.heads, dim=1)  # each [num_tokens, its heads, head_dim]
        return self.o_proj(attention(self.layer, q, k, v).flatten(1))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, ranks)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, ranks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Token ids and positions in, hidden states out; `logits` turns hidden states into scores.

    It is made without memory for its weights: `load_model` gives them memory and values.

    Args:
        ranks: the ranks that share the model; None if this is all of it.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        size = ranks.size if ranks is not None else 1
        self.share = share = config.share(size)  # the sizes of this rank's layers
        num_rows = -(-config.vocab_size // size)  # of the vocabulary; the last rank may have some too many
        embeddings = empty_weight(num_rows, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings, freeze=True)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(DecoderLayer(share, i, ranks) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, num_rows, False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionFn) -> Tensor:
        """input_ids, positions [num_tokens] → hidden states [num_tokens, hidden_size]."""
        x = self.embed_tokens(input_ids) if self.ranks is None else self._embed_share(input_ids, self.ranks)
        cos, sin = self.rotary(positions)
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

        They are on the device where tokens are drawn, see `sampling_device`.
        """
        scores = self.lm_head(hidden).float()
        if self.ranks is not None:
            return self.ranks.gather(scores)[:, : self.config.vocab_size]
        return scores.to(sampling_device(scores.device))

    def use(self, operations: Operations) -> None:
        """Compute the small operations of all layers with these functions."""
        for part in self.modules():
            if isinstance(part, Part):
                part.operations = operations

    def reorder_weights(self) -> None:
        """Reorder the weights of all linears, once they are loaded."""
        reasons = {linear.reorder_weight() for linear in self.modules() if isinstance(linear, Linear)} - {
            None
        }
        if reasons:
            logger.info("linear layers run without oneDNN's packed weights, and slower: %s", reasons.pop())
