"""What tutorials of PagedAttention show, with this engine's classes; after each part, what was wrong in them.

    python docs/experiments/tutorials.py            all parts
    python docs/experiments/tutorials.py 2 6        these parts

Widely read tutorials, most of them Chinese, show small programs of their own. Here the engine's block
manager, scheduler and reference attention do the same work. The book's list of wrong claims has the reasons.
"""

from __future__ import annotations

import argparse

from no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager, blocks_needed
from nanopaged.sequence import Sequence
from nanopaged.terminal import run_program


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("parts", nargs="*", type=int, help=f"1 to {len(PARTS)}; none: all")
    wanted = parser.parse_args().parts or range(1, len(PARTS) + 1)
    for number in wanted:
        if not 1 <= number <= len(PARTS):
            parser.error(f"there is no part {number}: the parts are 1 to {len(PARTS)}")
    for number in wanted:
        part = PARTS[number - 1]
        print(f"{number}. {part.__doc__}")
        part()
        print()


def sequence() -> Sequence:
    """The one sequence of a request, without tokens yet."""
    return make_request("", [], SamplingParams()).live[0]


def resize(manager: BlockManager, seq: Sequence, num_tokens: int) -> None:
    """Give the sequence this many tokens, and the blocks for them."""
    seq.token_ids = list(range(num_tokens))
    manager.append_slots([seq])
    manager.trim(seq)


def wrong(claim: str, right: str) -> None:
    print(f"   wrong: {claim}\n   right: {right}")


def growing_table() -> None:
    """A sequence grows to 0, 20, 45 and 100 tokens, in blocks of 16"""
    manager, seq = BlockManager(num_blocks=10, block_size=16), sequence()
    for num_tokens in (0, 20, 45, 100):
        resize(manager, seq, num_tokens)
        print(f"   {num_tokens:3} tokens   {len(seq.block_table)} blocks   table {seq.block_table}")
    wrong("45 tokens take 4 blocks.", "3 blocks have 48 slots.")


def six_events() -> None:
    """Six events on 100 blocks of 16: A 20, B 50, C 100, A grows to 80, B leaves, D 200 tokens"""
    manager, live = BlockManager(num_blocks=100, block_size=16), dict[str, Sequence]()
    for name, num_tokens in (("A", 20), ("B", 50), ("C", 100), ("A", 80), ("B", 0), ("D", 200)):
        resize(manager, live.setdefault(name, sequence()), num_tokens)
        print(f"   {name} has {num_tokens:3} tokens   {manager.num_free_blocks} blocks are free")
    print(f"   A's table {live['A'].block_table}, D's table {live['D'].block_table}")
    wrong("99, 97, 91, 89, 93, 81 blocks are free.", "The figures above: 25 blocks are in use at the end.")
    wrong("A's blocks stay contiguous.", "A grew after B and C: its blocks are in two places.")


def waste() -> None:
    """Sequences of 23, 67, 15 and 41 tokens, in blocks of 16"""
    lengths, size = (23, 67, 15, 41), 16
    blocks = [blocks_needed(num_tokens, size) for num_tokens in lengths]
    slots, tokens = size * sum(blocks), sum(lengths)
    print(f"   {blocks} blocks, {slots} slots for {tokens} tokens: {1 - tokens / slots:.1%} are empty")
    print(f"   reserving 128 slots for each wastes {(4 * 128 - tokens) / (slots - tokens):.1f} times as many")
    wrong("10 blocks, 8.75 % empty.", "67 tokens need a fifth block.")
    wrong("60 slots are wasted, 6.1 times less than by reserving.", "60 is the bound, 4 · (16 - 1).")


def shared_prefix() -> None:
    """S1 of 600 tokens, then S2 of 520 that begins with the same 512, in blocks of 256"""
    scheduler, runner = make_scheduler(num_blocks=8, block_size=256), NoModel()
    for name, prompt in (("S1", list(range(600))), ("S2", list(range(512)) + [0] * 8)):
        scheduler.add(request := make_request(name, prompt, SamplingParams(max_tokens=8)))
        scheduler.update(batch := scheduler.schedule(), runner.execute(batch))
        table, blocks = request.live[0].block_table, scheduler.block_manager.blocks
        counts = [blocks[block_id].ref_count for block_id in table]
        print(f"   {name}: {request.num_cached_tokens:3} tokens found   table {table}   references {counts}")
    wrong("Copy-on-write is part of prefix caching.", "Found blocks are full, so they are never written.")
    wrong("A reference count counts tokens.", "It counts the block tables that name a block.")


def pages_of_eight() -> None:
    """A prompt of 20 tokens in chunks of 5, in pages of 8"""
    scheduler, runner = make_scheduler(num_blocks=4, block_size=8, max_num_batched_tokens=5), NoModel()
    scheduler.add(request := make_request("", list(range(20)), SamplingParams(max_tokens=8)))
    seq = request.live[0]
    for _ in range(4):
        scheduler.update(batch := scheduler.schedule(), runner.execute(batch))
        filled = blocks_needed(seq.num_computed_tokens, 8)
        print(f"   {seq.num_computed_tokens:2} tokens are stored, pages used: {filled}")
    print(f"   {seq.num_tokens} tokens are known: the prefill of the last chunk gave one more")
    wrong("The first output token comes from a decode.", "It comes from the prefill's last logits.")


def toy_prefill() -> None:
    """A prefill of 4 tokens in pages of 2: scores 1, 2, 0, 3 for the last query, values 1, 2, 3, 4"""
    import torch

    from nanopaged.attention.reference_backend import reference_paged_attention

    scores, values = torch.tensor([1.0, 2, 0, 3]), torch.tensor([1.0, 2, 3, 4])
    k, v = (x.view(2, 1, 2, 1) for x in (scores, values))  # [num_blocks, num_kv_heads, block_size, head_dim]

    def attend(num_keys: int) -> float:
        """Attention to the first keys. The query is 1, so that a key is its own score."""
        return reference_paged_attention(torch.ones(1, 1), k, v, [0, 1], num_keys, 1.0).item()

    print("   each token sees those up to itself:", *(f"{attend(n):.3f}" for n in (1, 2, 3, 4)))
    pages = list(zip(scores.split(2), values.split(2), strict=True))
    parts = [torch.softmax(page, 0) @ its_values for page, its_values in pages]
    weights = [torch.exp(page.logsumexp(0) - scores.logsumexp(0)) for page, _ in pages]
    joined = weights[0] * parts[0] + weights[1] * parts[1]
    print(f"   the pages by themselves, joined by exp(LSE_b - LSE): {joined:.3f}")
    wrong("Attention over pages is Σ softmax(q·K_b)·V_b.", f"That is {sum(parts):.3f}: its weights sum to 2.")
    wrong("O of a page replaces the last one.", f"That is {weights[1] * parts[1]:.3f}: a page is lost.")
    wrong("Within a page no mask is needed.", f"Token 1 would get {attend(4):.3f}, not {attend(1):.3f}.")


def toy_decode() -> None:
    """A decode of a sequence whose 12 tokens are in the pages 5, 0 and 3"""
    import torch

    from nanopaged.attention.reference_backend import reference_paged_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(8, 8), torch.randn(6, 4, 4, 8), torch.randn(6, 4, 4, 8)
    table, scale = [5, 0, 3], 8**-0.5
    # Dense: keys and values [num_heads, 12, head_dim], gathered; two query heads share a KV head.
    keys, values = (x[table].transpose(0, 1).reshape(4, 12, 8).repeat_interleave(2, 0) for x in (k, v))
    dense = (torch.softmax(scale * q[:, None] @ keys.transpose(1, 2), -1) @ values)[:, 0]
    for name, block_table in (("through the table", table), ("in the order of pages", [0, 1, 2])):
        out = reference_paged_attention(q, k, v, block_table, 12, scale)
        print(f"   {name}: the largest difference to dense attention is {(out - dense).abs().max():.2f}")
    wrong("The decode reads pages in their order.", "The block table says which pages are the sequence's.")
    wrong("A running maximum may begin at 0.", "At scores near -200 each exponential is 0, and 0 / 0 is NaN.")


PARTS = [growing_table, six_events, waste, shared_prefix, pages_of_eight, toy_prefill, toy_decode]

if __name__ == "__main__":
    run_program(main)
