"""Stage 5: forks and copy-on-write. Small cases by hand, then random families over a model of the K/V."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest
from judge_2 import check_argument, saying

from nanopaged.beam_search import fork_samples
from nanopaged.block_manager import BlockManager, blocks_to_grow
from nanopaged.config import SamplingParams
from nanopaged.sequence import Request, Sample, Sequence
from nanopaged.text import StopRules

Copies = list[tuple[int, int]]


def request_of(*token_ids: int, max_length: int = 1000) -> Request:
    rules = StopRules(frozenset(), frozenset(), 0, max_length)
    return Request("r", None, list(token_ids), SamplingParams(n=4), rules, 0)


def with_table(request: Request, table: list[int], num_tokens: int) -> Sequence:
    """A sequence of the request with this block table, of which only the lengths matter."""
    return Sequence(request, list(range(num_tokens)), block_table=list(table))


def admitted(manager: BlockManager, num_tokens: int) -> Sequence:
    """A sequence whose prompt is computed, with its blocks."""
    (seq,) = request_of(*range(num_tokens)).live
    for _ in range(-(-num_tokens // manager.block_size)):
        seq.block_table.append(manager.take())
    seq.num_computed_tokens = num_tokens
    return seq


def forked(manager: BlockManager, num_tokens: int, width: int) -> list[Sequence]:
    """A prompt with `width` siblings that share all its blocks; the first is the original."""
    seq = admitted(manager, num_tokens)
    siblings = [seq, *(manager.fork(seq, i) for i in range(1, width))]
    seq.request.sequences, seq.request.live = siblings, siblings[:]
    return siblings


def draw(sequences: list[Sequence]) -> None:
    """Each sequence gets another token, without a slot and without K/V."""
    for i, seq in enumerate(sequences):
        seq.append(Sample(token_id=50 + i, logprob=-1.0))


def tables_of(sequences: list[Sequence]) -> list[list[int]]:
    return [list(seq.block_table) for seq in sequences]


def append_slots(manager: BlockManager, sequences: list[Sequence]) -> Copies | None:
    lengths, free = [seq.num_tokens for seq in sequences], manager.num_free_blocks
    with saying(
        f"`append_slots` for the tables {tables_of(sequences)} with {lengths} tokens and {free} free blocks"
    ):
        given = list(sequences)
        copies = manager.append_slots(given)
    check_argument("append_slots", given, sequences)
    return copies


def counts(manager: BlockManager) -> list[int]:
    return [block.ref_count for block in manager.blocks]


# ── fork ──────────────────────────────────────────────────────────────────────────────────────────


def test_fork_shares_every_block() -> None:
    manager = BlockManager(6, 4)
    parent = admitted(manager, 6)
    child = manager.fork(parent, 3)
    assert child is not parent, "`fork` returns the parent itself, not a copy of it."
    assert child.block_table == parent.block_table, (
        f"the parent's table is {parent.block_table}, the fork's {child.block_table}: they must be equal."
    )
    refs = [manager.blocks[block_id].ref_count for block_id in parent.block_table]
    assert refs == [2, 2], f"two tables name the parent's two blocks, but their reference counts are {refs}."
    assert manager.num_free_blocks == 4, (
        f"a fork takes no memory: {manager.num_free_blocks} blocks are free, not 4 as before."
    )
    assert child.num_computed_tokens == 6, (
        f"all 6 tokens are computed in the shared blocks, but the fork's `num_computed_tokens` is "
        f"{child.num_computed_tokens}."
    )
    assert child.index == 3, f"`fork(parent, 3)` makes the output of index {child.index}, not 3."
    assert child.request is parent.request, "the fork belongs to another request than its parent."
    assert child.token_ids == parent.token_ids, (
        f"the parent's tokens are {parent.token_ids}, the fork's {child.token_ids}."
    )


def test_a_fork_and_its_parent_go_different_ways() -> None:
    manager = BlockManager(6, 4)
    parent = admitted(manager, 6)
    child = manager.fork(parent, 1)
    child.block_table.append(manager.take())
    child.token_ids.append(9)
    assert len(parent.block_table) == 2, (
        "a block was appended to the fork's table and is in the parent's, too: it needs a list of its own."
    )
    assert parent.num_tokens == 6, "a token was appended to the fork, and the parent has it, too."


# ── blocks_to_grow ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tables", "num_tokens", "expected"),
    [
        ([[7, 2]], 7, 0),  # a free slot, and no sibling
        ([[7, 2]], 8, 0),
        ([[7, 2]], 9, 1),
        ([[7, 2]], 13, 2),
        ([[7]], 9, 2),
        ([[]], 4, 1),
        ([[7, 2], [7, 2]], 7, 1),  # one copy: the last writer needs none
        ([[7, 2], [7, 2]], 8, 1),
        ([[7, 2], [7, 2]], 9, 2),  # two new blocks; a full block is not copied
        ([[7, 2], [7, 2], [7, 2]], 6, 2),
        ([[7, 2], [7, 3]], 6, 0),  # the shared block 7 is full
        ([[7, 2], [7, 2], [7, 3], [7, 3]], 7, 2),
        ([[7, 2], [7, 2], [7, 3]], 5, 1),
        ([[7], [7], [7]], 5, 3),
        ([[7], [7], [7]], 9, 6),
        ([[7, 2]] * 12, 7, 11),
        ([[7, 2]] * 5 + [[7, 3]] * 6, 6, 9),
    ],
)
def test_blocks_to_grow(tables: list[list[int]], num_tokens: int, expected: int) -> None:
    request = request_of(1)
    sequences = [with_table(request, [], num_tokens) for _ in tables]  # as of a request that is swapped out
    given = [list(table) for table in tables]
    num = blocks_to_grow(sequences, given, 4)
    call = f"`blocks_to_grow` for the tables {tables}, {num_tokens} tokens each, blocks of 4,"
    assert num == expected, f"{call} gives {num}, not {expected}."
    assert given == tables, f"{call} has changed the tables to {given}: it only counts."


# ── append_slots ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [2, 3, 4, 12])
def test_a_shared_block_is_copied_before_it_is_written(width: int) -> None:
    """Exactly as many blocks are free as copies are needed."""
    manager = BlockManager(2 + width - 1, 4)
    siblings = forked(manager, 6, width)
    full, shared = siblings[0].block_table
    draw(siblings)
    copies = append_slots(manager, siblings)
    tables = tables_of(siblings)
    free = "1 block is free" if width == 2 else f"{width - 1} blocks are free"
    call = f"`append_slots` for {width} siblings {[full, shared]} with 7 tokens (blocks of 4 slots, {free})"
    assert copies is not None, (
        f"{call} gives None: {width - 1} copies are needed, the last writer needs none."
    )
    assert [src for src, _ in copies] == [shared] * (width - 1), (
        f"{call} gives the copies {copies}: their sources must be {[shared] * (width - 1)}."
    )
    assert all(len(table) == 2 and table[0] == full for table in tables), (
        f"{call} makes the tables {tables}: the full block {full} stays in the first place of all."
    )
    assert len({table[1] for table in tables}) == width, (
        f"{call} makes the tables {tables}: two siblings would write into the same block."
    )
    assert [table[1] for table in tables[:-1]] == [dst for _, dst in copies], (
        f"{call} gives the copies {copies}, and the tables {tables}: the destinations are not the blocks of "
        "the first writers, in order."
    )
    assert tables[-1][1] == shared, f"{call} makes the tables {tables}: the last writer keeps block {shared}."
    refs = [manager.blocks[table[1]].ref_count for table in tables]
    assert refs == [1] * width, f"{call} makes the tables {tables}; the last blocks have {refs} references."
    assert manager.blocks[full].ref_count == width, (
        f"{call} leaves the full block {manager.blocks[full].ref_count} references, not {width}."
    )
    assert manager.num_free_blocks == 0, f"{call} leaves {manager.num_free_blocks} blocks free, not 0."


def test_a_second_token_needs_no_copy() -> None:
    manager = BlockManager(4, 4)
    siblings = forked(manager, 6, 2)
    draw(siblings)
    append_slots(manager, siblings)
    for seq in siblings:
        seq.num_computed_tokens = 7
    draw(siblings)
    tables = tables_of(siblings)
    copies = append_slots(manager, siblings)
    assert copies == [], (
        f"both siblings {tables} have a last block of their own, but `append_slots` gives {copies}, not []."
    )
    assert tables_of(siblings) == tables, (
        f"both siblings had a slot, but the tables {tables} have become {tables_of(siblings)}."
    )


def test_a_full_last_block_is_not_copied() -> None:
    manager = BlockManager(4, 4)
    siblings = forked(manager, 4, 2)
    (full,) = siblings[0].block_table
    draw(siblings)
    copies = append_slots(manager, siblings)
    tables = tables_of(siblings)
    assert copies == [], (
        f"no sequence writes into the full block {full}: `append_slots` gives {copies}, not []."
    )
    is_right = len(tables[0]) == len(tables[1]) == 2 and tables[0][0] == tables[1][0] == full
    assert is_right, f"two siblings with the full block {full} and 5 tokens have the tables {tables}."
    assert tables[0][1] != tables[1][1], f"two siblings append the same new block: {tables}."


@pytest.mark.parametrize("num_tokens", [6, 8])
def test_without_blocks_for_all_nothing_changes(num_tokens: int) -> None:
    """Three siblings need two copies, or three new blocks; one block is free."""
    manager = BlockManager(3, 4)
    siblings = forked(manager, num_tokens, 3)
    draw(siblings)
    tables, before = tables_of(siblings), (counts(manager), sorted(manager.free_ids))
    copies = append_slots(manager, siblings)
    call = f"`append_slots` for three siblings {tables[0]} with {num_tokens + 1} tokens (blocks of 4 slots, "
    call += "1 block is free)"
    assert copies is None, f"{call} gives {copies}, not None."
    assert tables_of(siblings) == tables, f"{call} gives None, but the tables are {tables_of(siblings)}."
    after = counts(manager), sorted(manager.free_ids)
    assert after == before, f"{call} gives None, but counts and `free_ids` were {before}, and are {after}."


def test_growth_of_one_sequence_is_as_before() -> None:
    manager = BlockManager(3, 4)
    seq = admitted(manager, 7)
    for num_tokens, length in ((8, 2), (9, 3), (12, 3)):
        seq.token_ids = list(range(num_tokens))
        copies = append_slots(manager, [seq])
        assert copies == [], f"`append_slots` for {num_tokens} tokens of one sequence gives {copies}, not []."
        assert len(seq.block_table) == length, (
            f"{num_tokens} tokens in blocks of 4 have the table {seq.block_table}, not {length} blocks."
        )
    seq.token_ids = list(range(13))
    copies = append_slots(manager, [seq])
    assert copies is None, f"no block is left for token 13, but `append_slots` gives {copies}, not None."


def test_a_beam_that_waits_is_not_copied() -> None:
    """Its token is computed; its full last block is in use by another request, too. No block is free."""
    manager = BlockManager(3, 4)
    waiting = admitted(manager, 4)
    late = manager.fork(waiting, 1)
    manager.release(late.block_table[0])
    late.block_table = [manager.take(), manager.take()]
    late.token_ids.append(9)
    waiting.request.live = [waiting, late]
    manager.share(waiting.block_table[0])
    table = list(waiting.block_table)
    copies = append_slots(manager, [waiting, late])
    assert copies == [], (
        "a beam whose tokens are all computed waits for its sibling and writes nothing: its block is not "
        f"copied, but `append_slots` gives {copies}, not []."
    )
    assert waiting.block_table == table, (
        f"the waiting beam's table {table} has become {waiting.block_table}: it writes nothing."
    )


# ── fork_samples ──────────────────────────────────────────────────────────────────────────────────


def test_fork_samples() -> None:
    manager = BlockManager(6, 4)
    parent = admitted(manager, 6)
    request, table = parent.request, list(parent.block_table)
    samples = [Sample(20 + i, -1.0 - i) for i in range(3)]
    fork_samples(request, samples, manager)
    assert len(samples) == 3, f"`fork_samples` was given 3 samples, and has left {len(samples)} in the list."
    siblings = request.sequences
    assert len(siblings) == 3, f"after `fork_samples` with 3 samples there are {len(siblings)} sequences."
    assert [seq.index for seq in siblings] == [0, 1, 2], (
        f"`fork_samples` gives the sequences the indices {[seq.index for seq in siblings]}, not [0, 1, 2]."
    )
    last = [seq.token_ids[6:] for seq in siblings]
    assert last == [[20], [21], [22]], (
        f"the samples are 20, 21 and 22, but the siblings have {last} after the prompt."
    )
    logprobs = [seq.token_logprobs for seq in siblings]
    assert logprobs == [[-1.0], [-2.0], [-3.0]], (
        f"the samples' log-probabilities are -1, -2 and -3, but the siblings have {logprobs}: call `append`."
    )
    computed = [seq.num_computed_tokens for seq in siblings]
    assert computed == [6, 6, 6], (
        f"the prompt's 6 tokens are computed, the sample is not: `num_computed_tokens` are {computed}."
    )
    assert tables_of(siblings) == [table] * 3, (
        f"the siblings share the prompt's table {table}, but have {tables_of(siblings)}."
    )
    refs = [manager.blocks[block_id].ref_count for block_id in table]
    assert refs == [3, 3], (
        f"three tables name the prompt's blocks, but they have {refs} references: free the parent."
    )
    assert parent.block_table == [], f"the parent is freed, but its table is {parent.block_table}."
    is_right = len(request.live) == 3 and all(a is b for a, b in zip(request.live, siblings, strict=True))
    assert is_right, "none of the three siblings has ended, but `request.live` is not `request.sequences`."
    request.live.pop()
    assert len(request.sequences) == 3, (
        "`request.live` and `request.sequences` are the same list: a finished sample leaves only the first."
    )


def test_a_sample_may_end_at_its_first_token() -> None:
    manager = BlockManager(3, 4)
    request = request_of(*range(6), max_length=7)
    (parent,) = request.live
    parent.block_table, parent.num_computed_tokens = [manager.take(), manager.take()], 6
    fork_samples(request, [Sample(1, -1.0), Sample(2, -1.0)], manager)
    reasons = [seq.finish_reason for seq in request.sequences]
    assert reasons == ["length", "length"], f"both samples end at the limit of 7 tokens, but with {reasons}."
    assert request.live == [], f"`fork_samples` leaves {len(request.live)} of 2 ended samples in `live`."
    assert manager.num_free_blocks == 3, (
        f"both samples have ended, but {manager.num_free_blocks} of 3 blocks are free: free such a sample."
    )


def test_the_request_changes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a step fails in between, no fork is left without its token."""
    manager = BlockManager(6, 4)
    parent = admitted(manager, 6)
    append, calls = Sequence.append, []

    def failing(self: Sequence, sample: Sample) -> bool:
        calls.append(sample)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return append(self, sample)

    monkeypatch.setattr(Sequence, "append", failing)
    with suppress(KeyboardInterrupt):
        fork_samples(parent.request, [Sample(20 + i, -1.0) for i in range(3)], manager)
    for name, sequences in (("sequences", parent.request.sequences), ("live", parent.request.live)):
        is_right = len(sequences) == 1 and sequences[0] is parent
        assert is_right, (
            f"the step failed at the second sample, and `request.{name}` is not the parent alone: change the "
            "request after all forks have their tokens."
        )
    assert parent.num_tokens == 6, (
        f"the step failed, and the parent has {parent.num_tokens} tokens, not 6: the forks get the samples."
    )


# ── random ────────────────────────────────────────────────────────────────────────────────────────


class Pool:
    """Families of sequences that fork, write and end, over slots that hold the tokens themselves."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.size = self.rng.randint(1, 4)
        self.manager = BlockManager(self.rng.randint(8, 24), self.size, enable_prefix_caching=False)
        self.kv: dict[tuple[int, int], list[int]] = {}  # (block, offset) → all tokens up to the one stored
        self.requests: list[Request] = []
        self.last = "nothing"

    def __str__(self) -> str:
        blocks = f"{len(self.manager.blocks)} blocks of {self.size}"
        return f"random run {self.seed}, {blocks}, after {self.last}"

    def begin(self) -> None:
        num_tokens = self.rng.randint(1, 3 * self.size)
        if -(-num_tokens // self.size) > self.manager.num_free_blocks:
            return
        self.last = f"a prompt of {num_tokens} tokens"
        seq = admitted(self.manager, num_tokens)
        seq.num_computed_tokens = 0
        self.write(seq)
        samples = [Sample(self.rng.randrange(90), -1.0) for _ in range(self.rng.randint(1, 4))]
        self.last += f" and `fork_samples` with {len(samples)} samples"
        fork_samples(seq.request, samples, self.manager)
        self.requests.append(seq.request)

    def write(self, seq: Sequence) -> None:
        """The K/V of the tokens that are not computed yet is stored."""
        for i in range(seq.num_computed_tokens, seq.num_tokens):
            slot = seq.block_table[i // self.size], i % self.size
            self.kv[slot] = seq.token_ids[: i + 1]
        seq.num_computed_tokens = seq.num_tokens

    def step(self) -> None:
        """Room is made for the newest tokens. Some of the sequences compute theirs, or all."""
        request = self.rng.choice(self.requests)
        live, free = request.live, self.manager.num_free_blocks
        tables, lengths = tables_of(live), [seq.num_tokens for seq in live]
        none_waits = all(seq.num_computed_tokens < seq.num_tokens for seq in live)
        needed = blocks_to_grow(live, [list(table) for table in tables], self.size)
        self.last = f"`append_slots` for the tables {tables} with {lengths} tokens and {free} free blocks"
        expected = self.count(live)
        copies = self.manager.append_slots(live)
        if none_waits:
            assert needed == expected, f"{self}: `blocks_to_grow` gave {needed}, not {expected}."
            fits = expected <= free
            assert (copies is not None) is fits, (
                f"{self}: it gives {copies}, and {expected} blocks are needed."
            )
        if copies is None:
            assert tables_of(live) == tables, f"{self}: it gives None, but changed the tables."
            assert self.manager.num_free_blocks == free, f"{self}: it gives None, but took a block."
            self.end(request)
            return
        taken = free - self.manager.num_free_blocks
        assert taken == expected, f"{self}: it took {taken} blocks, and {expected} are needed."
        self.copy(copies, tables)
        late = self.rng.choice([0, 0, 0, self.rng.randrange(len(live))])
        for seq in live[: len(live) - late]:
            self.write(seq)
        for seq in live:
            self.read(seq)
        if not late:
            self.advance(request)

    def count(self, live: list[Sequence]) -> int:
        """New blocks, and copies for all but one of the writers of a block."""
        num, writers = 0, Counter()
        for seq in live:
            num += max(0, -(-seq.num_tokens // self.size) - len(seq.block_table))
            is_there = (seq.num_tokens - 1) // self.size < len(seq.block_table)
            if is_there and seq.num_computed_tokens < seq.num_tokens:
                writers[seq.block_table[-1]] += 1
        return num + sum(n - 1 for n in writers.values())

    def copy(self, copies: Copies, tables: list[list[int]]) -> None:
        named = {block_id for table in tables for block_id in table}
        destinations = [dst for _, dst in copies]
        assert len({*destinations}) == len(copies), f"{self}: a block is the destination of two of {copies}."
        assert not named & {*destinations}, f"{self}: a destination of {copies} was in use."
        assert {src for src, _ in copies} <= named, f"{self}: a source of {copies} was in no table."
        for src, dst in copies:
            for offset in range(self.size):
                if (src, offset) in self.kv:
                    self.kv[dst, offset] = self.kv[src, offset]

    def read(self, seq: Sequence) -> None:
        for i in range(seq.num_computed_tokens):
            slot = seq.block_table[i // self.size], i % self.size
            found, expected = self.kv.get(slot), seq.token_ids[: i + 1]
            assert found == expected, (
                f"{self}: the tables are {tables_of(seq.request.live)}; for position {i} of sequence "
                f"{seq.index} block {slot[0]} has the K/V of {found}, not of {expected}."
            )

    def advance(self, request: Request) -> None:
        """Every sequence draws a token, or the next beams are forked; then some end."""
        rng, beams = self.rng, request.live
        if rng.random() < 0.4 and len(beams) > 1:
            parents = rng.choices(beams, k=len(beams))
            self.last += f", then `fork` of the sequences {[seq.index for seq in parents]}"
            children = [self.manager.fork(parent, i) for i, parent in enumerate(parents)]
            for beam in beams:
                self.manager.free(beam)
            request.sequences, request.live = children, children[:]
        elif rng.random() < 0.2:
            ended = request.live.pop(rng.randrange(len(request.live)))
            self.last += f", then the end of sequence {ended.index}"
            self.manager.free(ended)
        for seq in request.live:
            seq.append(Sample(rng.randrange(90), -1.0))
        if not request.live:
            self.requests.remove(request)

    def end(self, request: Request) -> None:
        for seq in request.live:
            self.manager.free(seq)
        self.requests.remove(request)

    def check(self) -> None:
        named = Counter(b for request in self.requests for seq in request.live for b in seq.block_table)
        for block in self.manager.blocks:
            expected = named[block.block_id]
            assert block.ref_count == expected, (
                f"{self}: {expected} tables name block {block.block_id}: it has {block.ref_count} references."
            )


def test_random_families() -> None:
    for seed in range(30):
        here = Pool(seed)
        for _ in range(60):
            operations = [here.begin]
            if here.requests:
                operations += [here.step] * 4
            with saying(here):
                here.rng.choice(operations)()
            here.check()
