"""Wrong solutions of the exercises of chapter 3."""

RANGE = '''
class Pages:
    """One contiguous range, with a table for show."""

    def __init__(self, num_pages, size, dim):
        self.k, self.v = torch.full((2, num_pages, size, dim), math.nan)
        self.size, self.free, self.table, self.length = size, list(range(num_pages)), [], 0

    def append(self, k, v):
        if self.length % self.size == 0:
            self.table.append(self.free.pop())
        self.k.view(-1, len(k))[self.length], self.v.view(-1, len(v))[self.length] = k, v
        self.length += 1

    def attend(self, q):
        k, v = (memory.view(-1, len(q))[: self.length] for memory in (self.k, self.v))
        return torch.softmax(k @ q / math.sqrt(len(q)), dim=0) @ v


class Unused:
'''

BOTH = '''
class Pages:
    """Pages that are written, and two lists that are read."""

    def __init__(self, num_pages, size, dim):
        self.k, self.v = torch.full((2, num_pages, size, dim), math.nan)
        self.size, self.free, self.table, self.keys, self.values = size, list(range(num_pages)), [], [], []

    def append(self, k, v):
        if len(self.keys) % self.size == 0:
            self.table.append(self.free.pop())
        page, offset = self.table[-1], len(self.keys) % self.size
        self.k[page, offset], self.v[page, offset] = k, v
        self.keys.append(k)
        self.values.append(v)

    def attend(self, q):
        scores = torch.stack(self.keys) @ q / math.sqrt(len(q))
        return torch.softmax(scores, dim=0) @ torch.stack(self.values)


class Unused:
'''

GATHER = """    def attend(self, q):
        k, v = (memory[self.table].view(-1, len(q))[: self.length] for memory in (self.k, self.v))
        return torch.softmax(k @ q / math.sqrt(len(q)), dim=0) @ v

    def unused(self, q):
"""
GATHERED = "engine.runner.kv_cache.data[blocks, layer, 0, :, positions % size]"

WRONG_1 = [
    ("rounds down", "[97, 90, 77, 70, 77, 52]", "[98, 92, 80, 72, 78, 53]"),
    ("A takes all its blocks anew", "[97, 90, 77, 70, 77, 52]", "[97, 90, 77, 67, 74, 49]"),
    ("B gives nothing back", "[97, 90, 77, 70, 77, 52]", "[97, 90, 77, 70, 70, 45]"),
    ("counts the blocks in use", "[97, 90, 77, 70, 77, 52]", "[3, 10, 23, 30, 23, 48]"),
    ("five numbers", "[97, 90, 77, 70, 77, 52]", "[97, 90, 77, 77, 52]"),
    ("the share that is free", "48.0", "52.0"),
]
WRONG_2 = [
    ("a contiguous range", "class Pages:\n", RANGE),
    ("a second copy of the tokens", "class Pages:\n", BOTH),
    ("copies the pages together", "    def attend(self, q):\n", GATHER),
    ("pages from the front", "self.free.pop()", "self.free.pop(0)"),
    ("a page for each token", "if self.length % self.size == 0:", "if True:"),
    ("a page too early", "self.length % self.size == 0:", "self.length % self.size in (0, self.size - 1):"),
]
WRONG_3 = [
    ("zeros", GATHERED, "torch.zeros(len(positions), 2, 32)"),
    ("values", "layer, 0, :", "layer, 1, :"),
    ("always the first layer", "[blocks, layer, 0", "[blocks, 0, 0"),
    ("without the table", "torch.tensor(seq.block_table)[positions // size]", "positions // size"),
    ("in the order of the blocks", "torch.tensor(seq.block_table)", "torch.tensor(sorted(seq.block_table))"),
    ("the first slot of each block", "positions % size]", "positions % 1]"),
    (
        "zeros for generated tokens",
        "positions % size]",
        "positions % size] * (positions < 30)[:, None, None]",
    ),
]
