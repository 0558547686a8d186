"""Stage 7, written naively: row by row and token by token, in Python numbers."""
# ruff: noqa: F821


def filtered_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    rows = []
    for i, row in enumerate(logits):
        row = row / metadata.temperature[i]
        k, top_p, min_p = (x[i].item() for x in (metadata.top_k, metadata.top_p, metadata.min_p))
        if k < len(row):
            kth = sorted(row.tolist(), reverse=True)[int(k) - 1]
            row = torch.where(row < kth, -math.inf, row)
        probs = row.softmax(-1).tolist()
        lowest = min_p * max(probs)
        if top_p < 1:
            likely, total = sorted(probs, reverse=True), 0.0
            left = sum(probs)  # of the tokens from here on
            for p in likely:
                if total > 0 and left <= 1 - top_p:
                    break
                total, left, last = total + p, left - p, p
            lowest = max(lowest, last)
        rows.append([p if p >= lowest else 0.0 for p in probs])
    return torch.tensor(rows)


def draw_tokens(probs: Tensor, u: Tensor) -> Tensor:
    drawn = []
    for row, number in zip(probs.tolist(), u[:, 0].tolist(), strict=True):
        target, total, token = number * math.fsum(row), 0.0, 0
        for i, p in enumerate(row):
            if p > 0:
                token = i  # the last possible token, if rounding leads past the end
                total += p
                if total > target:
                    break
        drawn.append(token)
    return torch.tensor(drawn)


def sample(logits: Tensor, metadata: SamplingMetadata) -> list[Sample]:
    own = logits.log_softmax(-1)
    allowed = logits.clone()
    if metadata.penalties is not None:
        allowed = penalize(allowed, *metadata.penalties)
    if metadata.banned is not None:
        for row, token in metadata.banned.T.tolist():
            allowed[row, token] = -math.inf
    token_ids = allowed.argmax(-1).tolist()
    if not metadata.all_greedy:
        drawn = draw_tokens(filtered_probs(allowed, metadata), metadata.uniform).tolist()
        for row in range(len(logits)):
            if metadata.is_greedy[row].item() == 0:
                token_ids[row] = drawn[row]
    return gather_logprobs(own, torch.tensor(token_ids), metadata.num_logprobs, allowed)
