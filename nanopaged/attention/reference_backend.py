"""Paged attention, slow and obvious: read this backend first. The others compute the same."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.kv_cache import KVCache

ScoreMod = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""score_mod(layer, scores, queries, keys) → other scores, see `nanopaged.attention`."""


def reference_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: list[int],
    context_len: int,
    scale: float,
    score_mod: ScoreMod | None = None,
    layer: int = 0,
) -> Tensor:
    """Attention of one query, block by block, with a running softmax.

        o = Σ_b Σ_i exp(S_bi - m) V_bi / l     with S_b = scale · q K_bᵀ
                                               m = the maximum of all scores
                                               l = Σ_b Σ_i exp(S_bi - m)

    This is the online softmax (Milakov and Gimelshein, arXiv 1805.02867): when a block raises the
    maximum from m to m', the sums so far are multiplied by exp(m - m'). Two blocks with one score
    each, 1 and 3: after the first m = 1, l = 1; after the second m = 3, l = exp(1 - 3) · 1 + 1.

    Args:
        q: [num_heads, head_dim], of one token.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        context_len: keys that the query attends to: all up to and including its own.
        layer: for the `score_mod`.

    Returns:
        [num_heads, head_dim]
    """
    num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    # [num_kv_heads, group, head_dim]: the heads that share a KV head lie together.
    queries = q.float().view(num_kv_heads, -1, head_dim)
    # The maximum so far. It is not -inf, because a block may be masked, and -inf - -inf is NaN.
    m = torch.full_like(queries[..., :1], torch.finfo(torch.float32).min)
    l = torch.zeros_like(m)  # sum of exp(score - m)
    acc = torch.zeros_like(queries)  # sum of exp(score - m) · value
    for start in range(0, context_len, block_size):
        block_id = block_table[start // block_size]
        num_keys = min(block_size, context_len - start)  # the last block may be partial
        keys = k_cache[block_id, :, :num_keys].float()  # [num_kv_heads, num_keys, head_dim]
        values = v_cache[block_id, :, :num_keys].float()
        scores = scale * queries @ keys.mT  # [num_kv_heads, group, num_keys]
        if score_mod is not None:
            positions = torch.arange(context_len, device=q.device)
            keys_of_block = positions[start : start + num_keys]
            scores = score_mod(layer, scores, positions[-1:], keys_of_block)
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
        self.cache = cache
        self.scale = scale
        self.score_mod = score_mod

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Keep the metadata."""
        self.metadata = metadata

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute one layer: store all new K/V, then attend query by query."""
        k_cache, v_cache = self.cache.layer(layer)
        for token, slot in enumerate(self.metadata.slot_mapping.tolist()):
            block_id, offset = divmod(slot, self.cache.block_size)
            k_cache[block_id, :, offset] = k[token]
            v_cache[block_id, :, offset] = v[token]
        outputs = []
        for seq, block_table in enumerate(self.metadata.block_tables):
            context_len = int(self.metadata.context_lens[seq])
            first = context_len - int(self.metadata.query_lens[seq])
            for position in range(first, context_len):
                output = reference_paged_attention(
                    q[len(outputs)],
                    k_cache,
                    v_cache,
                    block_table,
                    context_len=position + 1,
                    scale=self.scale,
                    score_mod=self.score_mod,
                    layer=layer,
                )
                outputs.append(output)
        return torch.stack(outputs)
