"""Solutions of stage 7 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: the logits are changed
replace("filtered_probs", "logits / metadata.temperature", "logits.div_(metadata.temperature)")
# wrong: the metadata is changed
replace("filtered_probs", "logits / metadata.temperature", "logits / metadata.temperature.mul_(1.5)")


# wrong: the sums are float32
def draw_tokens(probs, u):
    found = torch.searchsorted(probs.cumsum(-1), u * probs.sum(-1, keepdim=True), right=True)
    return found[:, 0].clamp(max=probs.shape[-1] - 1)


# right: a search in float64, and filters over all tokens
def draw_tokens(probs, u):
    ends = probs.double().cumsum(-1)
    return torch.searchsorted(ends, u * ends[:, -1:], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def filtered_probs(logits, metadata):
    logits, size = logits / metadata.temperature, logits.shape[-1]
    kth = logits.sort(-1, descending=True).values.gather(1, metadata.top_k.long().clamp(max=size) - 1)
    probs = logits.masked_fill(logits < kth, -math.inf).softmax(-1)
    rising = probs.sort(-1).values
    dropped = (rising.double().cumsum(-1) <= 1.0 - metadata.top_p).sum(-1, keepdim=True).clamp(max=size - 1)
    probs = probs.masked_fill((probs < rising.gather(1, dropped)) & (metadata.top_p < 1.0), 0.0)
    return probs.masked_fill(probs < metadata.min_p * probs.amax(-1, keepdim=True), 0.0)
