"""Exercise 2.1, lay out a batch: see docs/book/02-one-request.md."""

import random

from lib.no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams
from nanopaged.model_runner import prepare


def lay_out(sequences: list[tuple[int, int, int, list[int]]], block_size: int) -> tuple[list[int], list[int]]:
    """The slots of all scheduled tokens, and the rows of the flat batch whose logits are needed.

    Each sequence is (known tokens, computed tokens, scheduled tokens, block table). Its scheduled tokens
    follow its computed ones. The tokens of the batch lie end to end; a row is the place of one of them.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def test_prepare_agrees() -> None:
    rng = random.Random(0)
    for size in (4, 1, 16):
        scheduler, runner = (
            make_scheduler(200, size, max_num_batched_tokens=5, enable_prefix_caching=False),
            NoModel(),
        )
        rng.shuffle(scheduler.block_manager.free_ids)
        for i in range(4):
            params = SamplingParams(max_tokens=rng.randint(1, 6), ignore_eos=True)
            scheduler.add(make_request(str(i), [i] * rng.randint(1, 12), params))
        while scheduler.waiting or scheduler.running:
            batch = scheduler.schedule()
            sequences = [
                (seq.num_tokens, seq.num_computed_tokens, seq.num_scheduled_tokens, list(seq.block_table))
                for seq in batch.sequences
            ]
            inputs = prepare(batch, size)
            slots, rows = lay_out(sequences, size)
            right_slots, right_rows = inputs.metadata.slot_mapping.tolist(), inputs.sample_rows
            call = f"lay_out({sequences}, {size})"
            assert list(slots) == right_slots, f"{call} has the slots {slots}, but prepare has {right_slots}."
            assert list(rows) == right_rows, f"{call} has the rows {rows}, but prepare has {right_rows}."
            scheduler.update(batch, runner.execute(batch))
