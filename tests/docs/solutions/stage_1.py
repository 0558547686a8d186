"""Solutions of stage 1 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: the sums are in q's dtype
replace("reference_paged_attention", "torch.zeros_like(_x)", "torch.zeros_like(_x, dtype=q.dtype)")
replace("reference_paged_attention", "torch.exp(_x)", "torch.exp(_x).to(q.dtype)")
replace("reference_paged_attention", "_values.float()", "_values.to(q.dtype)")
# wrong: the maximum begins at -1000
replace("reference_paged_attention", "torch.finfo(torch.float32).min", "-1000.0")
# wrong: the block table is emptied
replace("reference_paged_attention", "block_table[_i]", "block_table.pop(0)")
# wrong: q is scaled in place
replace("reference_paged_attention", "scale * _queries", "_queries.mul_(scale)")
# right: a maximum of -inf
replace("reference_paged_attention", "torch.finfo(torch.float32).min", "float('-inf')")
replace("reference_paged_attention", "torch.exp(_x)", "torch.exp(_x).nan_to_num(0.0)")


# right: token by token
def gather_context(cache, block_tables, num_keys):
    size = cache.shape[2]
    return torch.stack([cache[block_tables[..., p // size], :, p % size] for p in range(num_keys)], dim=-2)


def attend(q, k, v, queries, num_seen, score_mod=None):
    keys, scores = torch.arange(k.shape[-2]), q.float() @ k.float().mT
    scores = scores if score_mod is None else score_mod(scores, queries, keys)
    weights = torch.where(keys <= queries, scores, -torch.inf).softmax(-1)
    return (weights[..., None] * v.float()[..., None, :, :]).sum(-2).to(q.dtype)
