"""Wrong solutions of the exercises of chapter 10."""

SENT = '[real.max().item(), first + real.argmax().item()] if len(real) else [-float("inf"), first]'
HEADS = "max(1, config.num_kv_heads // size)"
ONE = "torch.relu(x @ up.T) @ down.T + bias"

WRONG_1 = [
    ("KV heads that are not shared by ranks", HEADS, "config.num_kv_heads // size"),
    ("a part of a head", HEADS, "config.num_kv_heads / size"),
    ("K alone", "return 2 * config", "return config"),
]
WRONG_2 = [
    ("every rank adds the bias", "bias if rank == 0 else torch.zeros_like(bias)", "bias"),
    ("nothing is divided", "return parts", f"return [{ONE}] + [torch.zeros_like(parts[0])] * (size - 1)"),
    ("everything on every rank, scaled", "return parts", f"return [({ONE}) / size] * size"),
]
WRONG_3 = [
    ("all logits concatenated", SENT, "share.tolist()"),
    ("padding takes part", "share[: max(0, vocab_size - first)]", "share"),
    ("the last of equal logits", "-pair[1]", "pair[1]"),
]
