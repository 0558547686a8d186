"""Wrong solutions of the exercises: each is the right one with a piece of it replaced."""

TIME = "2 * WEIGHTS / OPERATIONS"
STORE = "        self.k[page, offset], self.v[page, offset] = k, v\n"
GATHER = """    def attend(self, q):
        k, v = (memory[self.table].view(-1, len(q))[: self.length] for memory in (self.k, self.v))
        return torch.softmax(k @ q / math.sqrt(len(q)), dim=0) @ v

    def unused(self, q):
"""
AGED = "request.num_prompt_tokens + arrived[request.request_id]"
SHARE = "        engine.block_manager.share(block_id)\n"
MISCOUNT = "block.ref_count != entries[block.block_id]"
ENTRIES = "block_id for seq in sequences for block_id in seq.block_table"
COPIES = "copies_per_block * 10e-6 / block_size"
BYTES = "131072 / 50e9"
HEADS = "max(1, config.num_kv_heads // size)"
ONE = "torch.relu(x @ up.T) @ down.T + bias"
CACHED = "cached = self.blocks[block_id].ref_count == 0\n        "

# Exercise → what is wrong, a piece of the solution, what stands in its place
WRONG: dict[str, list[tuple[str, str, str]]] = {
    "01_1": [
        ("one block too many for a full one", "-(-length // size)", "length // size + 1"),
        ("all in one row", "sum(-(-length // size) for length in lengths)", "-(-sum(lengths) // size)"),
        ("a bound for each slot", "len(lengths) * (size - 1)", "len(lengths) * size"),
    ],
    "01_2": [
        ("the two speeds are confused", "/ OPERATIONS * BANDWIDTH", "/ BANDWIDTH * OPERATIONS"),
        ("a token has one size", "/ bytes_per_token", "/ 131_072"),
        ("the number from the page", "2 * WEIGHTS / OPERATIONS * BANDWIDTH / bytes_per_token", "556"),
        ("reads the weights for each request", TIME, f"({TIME} - 2 * WEIGHTS / BANDWIDTH)"),
    ],
    "02_1": [
        ("a row for each sequence", "if end == num_tokens:", "if True:"),
        ("rows only of decodes", "if end == num_tokens:", "if end == num_tokens and num_scheduled == 1:"),
        ("without the table", "table[position // block_size]", "(position // block_size)"),
    ],
    "03_1": [
        ("A takes all its blocks anew", "[97, 90, 77, 70, 77, 52]", "[97, 90, 77, 67, 74, 49]"),
        ("the share that is free", "48.0", "52.0"),
    ],
    "03_2": [
        ("a contiguous range", STORE, f"        page = self.length // self.size\n{STORE}"),
        ("copies the pages together", "    def attend(self, q):\n", GATHER),
        ("a page too early", "self.length % self.size == 0:", "(self.length + 1) % self.size < 2:"),
    ],
    "03_3": [
        ("in the order of the blocks", "(seq.block_table)", "(sorted(seq.block_table))"),
        (
            "zeros for generated tokens",
            "positions % size]",
            "positions % size] * (positions < 30)[:, None, None]",
        ),
    ],
    "04_1": [
        ("prompts whole", "if rest == 0", "if running and waiting.get(name, [0])[0] > rest or rest == 0"),
        ("a token after each chunk", "num_tokens, to_generate\n", "num_tokens + 1, to_generate - 1\n"),
    ],
    "04_2": [
        ("ages too slowly", "+ arrived[request.request_id]", "+ 0.2 * arrived[request.request_id]"),
        ("ages too fast", "+ arrived[request.request_id]", "+ 3 * arrived[request.request_id]"),
    ],
    "05_1": [
        ("no maximum is subtracted", "(lses - top).exp()", "lses.exp()"),
        ("the maximum over the heads", "lses.amax(0)", "lses.amax(1, keepdim=True)"),
        ("NaN of an empty split", "outs.masked_fill((lses == -math.inf)[..., None], 0)", "outs"),
        ("the outputs are overwritten", "outs.masked_fill((", "outs.masked_fill_(("),
    ],
    "06_1": [
        ("the block of the last token is looked up", "min(common, length - 1)", "min(common, length)"),
        ("tokens, not blocks", " // block_size * block_size", ""),
        ("one token too few", "min(common, length - 1)", "min(common - 1, length - 1)"),
        ("what is common is ignored", "min(common, length - 1)", "(length - 1)"),
    ],
    "06_2": [
        ("no reference", SHARE, ""),
        ("two references", SHARE, 2 * SHARE),
        ("the last block is not looked up", "[*prefix, 0]", "prefix"),
    ],
    "07_1": [
        ("full blocks are copied, too", "(n - 1) * has_partial", "n - 1"),
        ("one copy for all", "(n - 1) * has_partial", "int(has_partial and n > 1)"),
        ("one new block for all samples", "num_tokens // block_size + n", "num_tokens // block_size + 1"),
    ],
    "07_2": [
        ("only counts that are too large", MISCOUNT, "block.ref_count > entries[block.block_id]"),
        ("only counts that are too small", MISCOUNT, "block.ref_count < entries[block.block_id]"),
        ("each block once", ENTRIES, f"{{{ENTRIES}}}"),
        ("only blocks in a table", "manager.blocks if", "manager.blocks if block.block_id in entries and"),
    ],
    "08_1": [
        ("the end of the prompt is shared, too", "num_prompt // block_size", "-(-num_prompt // block_size)"),
        ("only full blocks", "-(-num_computed // block_size)", "num_computed // block_size"),
        ("a block for the token that is not computed", "-(-num_computed", "-(-(num_computed + 1)"),
    ],
    "08_2": [
        ("one way", "2 * 1e6 * (copies", "1e6 * (copies"),
        ("one copy for a block", COPIES, "10e-6 / block_size"),
        ("the bytes of a block", BYTES, f"block_size * {BYTES}"),
    ],
    "10_1": [
        ("KV heads that are not shared by ranks", HEADS, "config.num_kv_heads // size"),
        ("all heads on every rank", HEADS, "config.num_kv_heads"),
        ("K alone", "return 2 * config", "return config"),
    ],
    "10_2": [
        ("every rank adds the bias", "bias if rank == 0 else torch.zeros_like(bias)", "bias"),
        ("nothing is divided", "return parts", f"return [{ONE}] + [torch.zeros_like(parts[0])] * (size - 1)"),
        ("everything on every rank, scaled", "return parts", f"return [({ONE}) / size] * size"),
        ("added up already", "return parts", "return [sum(parts)]"),
        ("only the first columns of down", "down[:, mine]", "down[:, :width]"),
    ],
    "11_1": [
        ("the token budget", '"--max-num-seqs", "64"', '"--budget", "512"'),
        ("fewer requests", '"--max-num-seqs", "64"', '"--requests", "50"'),
    ],
    "12_1": [
        ("the most recently used of several", "min(self.cached,", "min(reversed(self.cached),"),
        ("hits of the block's former contents", "        self.num_hits[block_id] = 0\n", ""),
        (
            "hits in use",
            "super().share(block_id)\n",
            f"{CACHED}super().share(block_id)\n        if not cached:\n            return\n",
        ),
    ],
    "claims_1": [
        ("the last block of the prompt is shared, too", "(prompt - 1) //", "prompt //"),
        ("a partial block is shared", "(prompt - 1) // block_size", "-(-prompt // block_size)"),
        ("the last token is stored", "output - 1", "output"),
    ],
}
