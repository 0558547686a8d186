"""Wrong solutions of the exercises of chapter 10."""

HEADS = "max(1, config.num_kv_heads // size)"
ONE = "torch.relu(x @ up.T) @ down.T + bias"

WRONG_1 = [
    ("KV heads that are not shared by ranks", HEADS, "config.num_kv_heads // size"),
    ("a part of a head", HEADS, "config.num_kv_heads / size"),
    ("all heads on every rank", HEADS, "config.num_kv_heads"),
    ("K alone", "return 2 * config", "return config"),
    ("one byte for a number", "config.head_dim * 2 * 16", "config.head_dim * 16"),
    ("one layer", "config.num_layers", "1"),
]
WRONG_2 = [
    ("every rank adds the bias", "bias if rank == 0 else torch.zeros_like(bias)", "bias"),
    ("no rank adds the bias", "bias if rank == 0 else torch.zeros_like(bias)", "torch.zeros_like(bias)"),
    ("nothing is divided", "return parts", f"return [{ONE}] + [torch.zeros_like(parts[0])] * (size - 1)"),
    ("everything on every rank, scaled", "return parts", f"return [({ONE}) / size] * size"),
    ("added up already", "return parts", "return [sum(parts)]"),
    ("only the first columns of down", "down[:, mine]", "down[:, :width]"),
]
