"""Paged attention, slow and obvious: read this backend first. The others compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.kv_cache import KVCache

ScoreMod = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""score_mod(layer, scores, queries, keys) → other scores, see `nanopaged.attention`."""
LayerMod = Callable[[Tensor, Tensor, Tensor], Tensor]  # that of one layer


def reference_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: list[int],
    context_len: int,
    scale: float,
    score_mod: LayerMod | None = None,
) -> Tensor:
    """Attention of one query, block by block, with a running softmax.

        o = Σ_b Σ_i exp(S_bi - m) V_bi / l     with S_b = scale · q K_bᵀ, m the maximum of all scores,
                                               l = Σ_b Σ_i exp(S_bi - m)

    The online softmax (Milakov and Gimelshein, arXiv 1805.02867): when a block raises the maximum from m to
    m', the sums so far are multiplied by exp(m - m'). Of scores 1 and 3, in two blocks, first m = 1, l = 1;
    then m = 3, l = exp(1 - 3) · 1 + 1.

    Args:
        q: [num_heads, head_dim], of one token.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        context_len: keys that the query attends to: all up to and including its own.

    Returns:
        [num_heads, head_dim]
    """
    num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    queries = q.float().view(
        num_kv_heads, -1, head_dim
    )  # the heads that share a KV head lie together
    # The maximum so far. It is not -inf: a block may be masked, and -inf - -inf is NaN.
    m = queries.new_full((*queries.shape[:2], 1), torch.finfo(torch.float32).min)
    l = torch.zeros_like(m)  # sum of exp(score - m)
    acc = torch.zeros_like(queries)  # sum of exp(score - m) · value
    for i, block_id in enumerate(block_table):
        here = min(block_size, context_len - i * block_size)  # the last block may be partial
        if here <= 0:
            break
        keys = k_cache[block_id, :, :here].float()  # [num_kv_heads, here, head_dim]
        values = v_cache[block_id, :, :here].float()
        scores = scale * queries @ keys.transpose(1, 2)  # [num_kv_heads, group, here]
        if score_mod is not None:
            positions = torch.arange(context_len, device=q.device)
            scores = score_mod(scores, positions[-1:], positions[i * block_size :][:here])
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        p = torch.exp(scores - m_new)
        rescale = torch.exp(m - m_new)
        l = l * rescale + p.sum(-1, keepdim=True)
        acc = acc * rescale + p @ values
        m = m_new
    return (acc / l).view(num_heads, head_dim).to(q.dtype)


class ReferenceAttention:
    """The loop above, for every query of the batch."""

    supports_cuda_graphs = False

    def __init__(self, cache: KVCache, scale: float, score_mod: ScoreMod | None = None) -> None:
        self.cache, self.scale, self.score_mod = cache, scale, score_mod

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Keep the metadata."""
        self.metadata = metadata

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: store all new K/V, then query by query."""
        k_cache, v_cache = self.cache.layer(layer)
        for token, slot in enumerate(self.metadata.slot_mapping.tolist()):
            block_id, offset = divmod(slot, self.cache.block_size)
            k_cache[block_id, :, offset], v_cache[block_id, :, offset] = k[token], v[token]
        score_mod = partial(self.score_mod, layer) if self.score_mod is not None else None
        out, token = torch.empty_like(q), 0
        lens = zip(
            self.metadata.query_lens.tolist(), self.metadata.context_lens.tolist(), strict=True
        )
        for block_table, (query_len, context_len) in zip(
            self.metadata.block_tables, lens, strict=True
        ):
            for position in range(context_len - query_len, context_len):
                where = k_cache, v_cache, block_table, position + 1
                out[token] = reference_paged_attention(q[token], *where, self.scale, score_mod)
                token += 1
        return out
