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


GATHER = """    def attend(self, q):
        k, v = (memory[self.table].view(-1, len(q))[: self.length] for memory in (self.k, self.v))
        return torch.softmax(k @ q / math.sqrt(len(q)), dim=0) @ v

    def unused(self, q):
"""

WRONG_1 = [
    ("A takes all its blocks anew", "[97, 90, 77, 70, 77, 52]", "[97, 90, 77, 67, 74, 49]"),
    ("B gives nothing back", "[97, 90, 77, 70, 77, 52]", "[97, 90, 77, 70, 70, 45]"),
    ("the share that is free", "48.0", "52.0"),
]
WRONG_2 = [
    ("a contiguous range", "class Pages:\n", RANGE),
    ("copies the pages together", "    def attend(self, q):\n", GATHER),
    ("a page too early", "self.length % self.size == 0:", "self.length % self.size in (0, self.size - 1):"),
]
WRONG_3 = [
    ("without the table", "torch.tensor(seq.block_table)[positions // size]", "positions // size"),
    ("in the order of the blocks", "torch.tensor(seq.block_table)", "torch.tensor(sorted(seq.block_table))"),
    (
        "zeros for generated tokens",
        "positions % size]",
        "positions % size] * (positions < 30)[:, None, None]",
    ),
]
