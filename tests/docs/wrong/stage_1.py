"""Solutions of stage 1 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F821

# wrong: the sums are in q's dtype
replace("reference_paged_attention", "torch.zeros_like(m)", "torch.zeros_like(m, dtype=q.dtype)")
replace("reference_paged_attention", "+ p.sum(-1, keepdim=True)", "+ p.sum(-1, keepdim=True).to(q.dtype)")
replace("reference_paged_attention", "torch.exp(m - m_new)", "torch.exp(m - m_new).to(q.dtype)")
# wrong: the maximum begins at -1000
replace("reference_paged_attention", "torch.finfo(torch.float32).min", "-1000.0")
# wrong: the block table is emptied
replace(
    "reference_paged_attention",
    "enumerate(block_table)",
    "enumerate(block_table.pop(0) for _ in block_table[:])",
)
# wrong: q is scaled in place
replace("reference_paged_attention", "scale * queries", "queries.mul_(scale)")
# right: a maximum of -inf
replace("reference_paged_attention", "torch.finfo(torch.float32).min", "float('-inf')")
replace("reference_paged_attention", "torch.exp(scores - m_new)", "torch.exp(scores - m_new).nan_to_num(0.0)")
replace("reference_paged_attention", "torch.exp(m - m_new)", "torch.exp(m - m_new).nan_to_num(0.0)")
