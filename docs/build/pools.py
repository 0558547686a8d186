"""Two pools of blocks, one with the engine's own functions and one with the reader's, do what a table says.

A row of a judge's table has commands, which are the methods of `Pool`. They stand in the sentence as well:

    allocate A 1 2 3 | B 1 2 4    one request with the sequences A and B, which have these tokens
    compute A 3                   the next 3 tokens of A are scheduled, published, computed; otherwise all
    append A 7 | B 8              A and B have one more token each; `append_slots` for their request
    take x; share x; share A[0]   a taken block has a name; the first block of A
    schedule A 8 chunks=0         the request of A gets tokens, with a budget of 8
    keys 1 2 3 salt=1             the keys of a new sequence with these tokens
    grow 9 7 2 | 7 3              `blocks_to_grow` of two sequences of 9 tokens with these tables
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from beside import check_facts, engines_own, make_request, renumbered

from nanopaged import SamplingParams, beam_search, block_manager
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Move, Request, Sample, ScheduledBatch, Sequence
from nanopaged.snapshot import short_key
from nanopaged.swap import Swapper


def table(cases: list[tuple[str, str, str, str]]) -> Callable[..., None]:
    """A test: both sides run the commands. After each of them the results and the pools must agree.

    Args:
        cases: the function that is judged, the rule, the sizes (such as "6 blocks of 2" or "6 blocks of 2,
            uncached, 4 on the host"), and the commands.
    """

    @pytest.mark.parametrize(("function", "rule", "sizes", "commands"), cases)
    def test(function: str, rule: str, sizes: str, commands: str) -> None:
        engines = Pool(sizes)
        readers = Pool(sizes)
        done: list[str] = []
        for command in commands.split("; "):
            done.append(command)
            where = f"{rule}. {sizes}: {'; '.join(done)}."
            with engines_own():
                expected = {"The last one returns": engines.do(command)}
            check_facts(where, {"The last one returns": readers.do(command)}, expected)
            check_facts(f"{where} Now", readers.facts(), engines.facts())

    return test


def numbers_of(words: Iterable[str]) -> list[int]:
    """Numbers and ranges: "7 1..3" is 7 1 2 3."""
    numbers: list[int] = []
    for word in words:
        first, _, last = word.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def groups_of(words: Iterable[str]) -> dict[str, list[int]]:
    """The words "A 1 2 | B 3" are {"A": [1, 2], "B": [3]}."""
    groups = [group.split() for group in " ".join(words).split("|")]
    return {name: numbers_of(numbers) for name, *numbers in groups}


class Pool:
    """Blocks, host blocks, and sequences with names."""

    def __init__(self, sizes: str) -> None:
        numbers = [int(word) for word in sizes.replace(",", "").split() if word.isdigit()]
        num_blocks, block_size, *host = numbers
        self.manager = BlockManager(num_blocks, block_size, "uncached" not in sizes)
        self.swapper = Swapper(self.manager, host[0] if host else 0)
        self.sequences: dict[str, Sequence] = {}
        self.blocks: dict[str, int] = {}  # that `take` has given
        self.free_ids = self.manager.free_ids
        self.cached = self.manager.cached

    def do(self, command: str) -> Any:
        """Run a command. Returns what the function has returned, without the numbers of blocks."""
        name, *words = command.split()
        options = dict(word.split("=") for word in words if "=" in word)
        numbers = {option: int(value) for option, value in options.items()}
        try:
            return getattr(self, name)(*[word for word in words if "=" not in word], **numbers)
        except RuntimeError as error:
            return type(error).__name__

    def facts(self) -> dict[str, Any]:
        """What all right solutions have in common."""
        manager = self.manager
        sequences = self.sequences.values()
        requests = dict.fromkeys(seq.request for seq in sequences)
        live = [[seq.index for seq in request.live] for request in requests]
        siblings = [[seq.index for seq in request.sequences] for request in requests]
        tables = [seq.block_table for seq in sequences] + [list(self.blocks.values())]
        counts = [[manager.blocks[block_id].ref_count for block_id in table] for table in tables]
        unused = [block.block_id for block in manager.blocks if block.ref_count == 0]
        published = {block.block_id: block.key for block in manager.blocks if block.key is not None}
        indexed = {block.block_id: key for key, block in manager.prefix_index.items()}
        cached = [name_of(manager.blocks[block_id].key) for block_id in manager.cached]
        is_complete = sorted([*manager.free_ids, *manager.cached]) == unused
        is_same = self.free_ids is manager.free_ids and self.cached is manager.cached
        return {
            "the tables, with blocks numbered as they appear, are": renumbered(tables),
            "the reference counts in these tables are": counts,
            "the host tables are": renumbered(seq.host_table for seq in sequences),
            "num_computed_tokens are": [seq.num_computed_tokens for seq in sequences],
            "num_free_blocks is": manager.num_free_blocks,
            "the number of free host blocks is": len(self.swapper.free_ids),
            "the keys in `cached`, longest unused first, are": cached,
            "the keys in `prefix_index` are": sorted(name_of(key) for key in manager.prefix_index),
            "`prefix_index` leads to all blocks with a key, and to no other:": indexed == published,
            "each unused block is in `free_ids` or `cached`:": is_complete,
            "`free_ids` and `cached` are still the same objects:": is_same,
            "the tokens are": [seq.token_ids for seq in sequences],
            "the sequences in `request.live` are": live,
            "the sequences of the request are": siblings,
        }

    # ── commands: one block ───────────────────────────────────────────────────────────────────────

    def block(self, name: str) -> int:
        sequence, _, index = name.rstrip("]").partition("[")
        return self.sequences[sequence].block_table[int(index)] if index else self.blocks[name]

    def take(self, name: str) -> str:
        self.blocks[name] = self.manager.take()
        return type(self.blocks[name]).__name__

    def share(self, name: str) -> None:
        self.manager.share(self.block(name))

    def release(self, name: str) -> None:
        self.manager.release(self.block(name))

    def key(self, *names: str) -> None:
        """What stage 4 does: the blocks have keys, and stand in the index."""
        for name in names:
            block = self.manager.blocks[self.block(name)]
            block.key = name.encode()
            self.manager.prefix_index[block.key] = block

    # ── commands: sequences ───────────────────────────────────────────────────────────────────────

    def request(
        self,
        groups: dict[str, list[int]],
        salt: int = 0,
        max_tokens: int = 99,
        prompt_logprobs: int | None = None,
    ) -> Request:
        params = SamplingParams(
            n=len(groups), max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs
        )
        request = make_request("r", next(iter(groups.values())), params, bytes(salt))
        request.sequences = [Sequence(request, tokens, index) for index, tokens in enumerate(groups.values())]
        request.live = list(request.sequences)
        return request

    def allocate(self, *words: str, num_reserved: int = 0, **options: int) -> bool:
        groups = groups_of(words)
        request = self.request(groups, **options)
        self.sequences |= zip(groups, request.sequences, strict=True)
        return self.manager.allocate(request.live, num_reserved=num_reserved)

    def find(self, *tokens: str, **options: int) -> int:
        request = self.request({"sought": numbers_of(tokens)}, **options)
        return len(self.manager.find_prefix(request.live[0]))

    def compute(self, name: str, num_tokens: str | None = None) -> None:
        seq = self.sequences[name]
        seq.num_scheduled_tokens = int(num_tokens or seq.num_tokens - seq.num_computed_tokens)
        self.manager.publish(seq)
        seq.num_computed_tokens += seq.num_scheduled_tokens

    def token(self, name: str, token: str) -> None:
        """A token that has no slot yet."""
        self.sequences[name].token_ids.append(int(token))

    def append(self, *words: str) -> list[list[int]] | None:
        """Returns the copies, with blocks numbered as in the tables before and after them."""
        for name, tokens in groups_of(words).items():
            seq = self.sequences[name]
            seq.token_ids += tokens
        before = [list(other.block_table) for other in seq.request.sequences]
        copies = self.manager.append_slots(seq.request.live)
        if not copies:
            return copies
        after = [other.block_table for other in seq.request.sequences]
        return renumbered([*before, *after, *map(list, copies)])[2 * len(before) :]

    def trim(self, name: str, num_tokens: str) -> None:
        self.manager.trim(self.sequences[name], int(num_tokens))

    def free(self, name: str) -> None:
        self.manager.free(self.sequences[name])

    def fork(self, name: str, child: str) -> None:
        parent = self.sequences[name]
        index = len(parent.request.sequences)
        self.sequences[child] = self.manager.fork(parent, index)
        parent.request.sequences.append(self.sequences[child])
        parent.request.live.append(self.sequences[child])

    def fork_samples(self, name: str, *tokens: str) -> dict[str, Any]:
        """The samples are called A0, A1, …"""
        request = self.sequences[name].request
        samples = [Sample(token_id, -1.0 - token_id) for token_id in numbers_of(tokens)]
        beam_search.fork_samples(request, samples, self.manager)
        for index, seq in enumerate(request.sequences):
            self.sequences[f"{name}{index}"] = seq
        return {
            "log-probabilities": [seq.cumulative_logprob for seq in request.sequences],
            "the list of samples": [sample.token_id for sample in samples],
            "`live` and `sequences` are one list": request.live is request.sequences,
        }

    # ── commands: of one function ─────────────────────────────────────────────────────────────────

    def keys(self, *tokens: str, salt: int = 0) -> dict[str, Any]:
        """The first key, then all of them, then again, when nothing is to be hashed."""
        seq = self.request({"A": numbers_of(tokens)}, salt).live[0]
        num_blocks = seq.num_tokens // self.manager.block_size
        first = list(self.manager.keys_of(seq, 1))
        keys = list(self.manager.keys_of(seq, num_blocks))
        with patch.object(block_manager, "sha256", wraps=block_manager.sha256) as hashing:
            again = [list(self.manager.keys_of(seq, num)) for num in (1, num_blocks)]
        facts = {f"key {i}": key.hex() for i, key in enumerate(keys)}
        is_same = first == keys[:1] and again == [first, keys]
        return facts | {"the same again": is_same, "hashed again": hashing.call_count}

    def schedule(self, name: str, budget: str, chunks: int = 1) -> dict[str, Any]:
        """What the request gets of the budget, and which blocks are published."""
        scheduler = Scheduler(self.manager, 99, 99, enable_chunked_prefill=chunks == 1)
        batch = ScheduledBatch()
        rest = scheduler._schedule_tokens(self.sequences[name].request, int(budget), batch)
        tokens = {seq.index: seq.num_scheduled_tokens for seq in batch.sequences}
        is_decode = [seq.num_scheduled_tokens == 1 for seq in batch.sequences]
        return {
            "the tokens of the batch's sequences": dict(sorted(tokens.items())),
            "the rest of the budget": rest,
            "num_decodes": batch.num_decodes,
            "which of the batch have one token": is_decode,
        }

    def grow(self, num_tokens: str, *words: str) -> tuple[int, list[list[int]]]:
        """Returns the tables as well, which do not change. Their blocks are not the pool's."""
        tables = [numbers_of(table.split()) for table in " ".join(words).split("|")]
        request = self.request({"A": [1]})
        sequences = [Sequence(request, [0] * int(num_tokens), block_table=table) for table in tables]
        return block_manager.blocks_to_grow(sequences, self.manager.block_size), tables

    # ── commands: host memory ─────────────────────────────────────────────────────────────────────

    def swap_out(self, name: str) -> list[tuple[int, int]] | None:
        return self.moves(name, self.swapper.swap_out, "block_table", "host_table")

    def swap_in(self, name: str, num_reserved: int = 0) -> list[tuple[int, int]] | None:
        swap = partial(self.swapper.swap_in, num_reserved=num_reserved)
        return self.moves(name, swap, "host_table", "block_table")

    def moves(
        self, name: str, swap: Callable[[Request], list[Move] | None], source: str, destination: str
    ) -> list[tuple[int, int]] | None:
        """The moves in any order: sources numbered as in the tables before, destinations as after."""
        request = self.sequences[name].request
        before = [list(getattr(seq, source)) for seq in request.live]
        moves = swap(request)
        if moves is None:
            return None
        after = [getattr(seq, destination) for seq in request.live]
        sources = renumbered([*before, [block_id for block_id, _ in moves]])[-1]
        destinations = renumbered([*after, [block_id for _, block_id in moves]])[-1]
        return sorted(zip(sources, destinations, strict=True))

    def release_host(self, name: str) -> None:
        self.swapper.release(self.sequences[name].request)


def name_of(key: bytes | None) -> str:
    """Of a block that was published by its name, or the hash of a real key."""
    return key.decode() if key is not None and len(key) < 8 else short_key(key or b"")
