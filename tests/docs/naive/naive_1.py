"""Stage 1, written naively: one token, or one query, after another; each block is read twice."""
# ruff: noqa: ANN001, ANN002, ANN201, F821

# right: written naively


def gather_context(cache, block_tables, num_keys):
    block_size = cache.shape[2]
    tokens = [cache[block_tables[..., p // block_size], :, p % block_size] for p in range(num_keys)]
    return torch.stack(tokens, dim=-2)


def attend(q, k, v, queries, num_seen, score_mod=None):
    keys = torch.arange(k.shape[-2], device=q.device)
    scores = (q.float()[..., None, :] * k.float()[..., None, :, :]).sum(-1)
    if score_mod is not None:
        scores = score_mod(scores, queries, keys)
    scores = torch.where(keys <= queries, scores, -torch.inf)
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights[..., None] * v.float()[..., None, :, :]).sum(-2).to(q.dtype)


def reference_paged_attention(q, k_cache, v_cache, block_table, context_len, scale, score_mod=None):
    num_heads = q.shape[0]
    group, block_size = num_heads // k_cache.shape[1], k_cache.shape[2]
    blocks = []  # scores and values of each block
    for first in range(0, context_len, block_size):
        here = min(block_size, context_len - first)
        block = block_table[first // block_size]
        keys = k_cache[block, :, :here].float().repeat_interleave(group, dim=0)
        values = v_cache[block, :, :here].float().repeat_interleave(group, dim=0)
        scores = scale * (keys * q.float()[:, None]).sum(-1)
        if score_mod is not None:
            scores = score_mod(scores, torch.tensor([context_len - 1]), torch.arange(first, first + here))
        blocks.append((scores, values))
    top = torch.stack([scores.max(dim=-1).values for scores, _ in blocks]).max(dim=0).values
    total, out = 0, 0
    for scores, values in blocks:
        weights = torch.exp(scores - top[:, None])
        total = total + weights.sum(dim=-1)
        out = out + (weights[..., None] * values).sum(1)
    return (out / total[:, None]).to(q.dtype)
