"""How the sequences of one request branch: parallel sampling once, beam search at every step.

A branch costs no memory when it is made: the child shares the parent's blocks, and the first of them to write
into a shared block gets a copy of its own (`BlockManager.append_slots`).
"""

from __future__ import annotations

from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Request, Sequence
from nanopaged.text.outputs import Sample


def fork_samples(seq: Sequence, block_manager: BlockManager) -> list[Sequence]:
    """The prompt is computed: one sequence for each output that was asked for, `seq` the first of them."""
    request = seq.request
    for index in range(1, request.params.num_sequences):
        _add_child(request, seq, index, block_manager)
    return list(request.sequences)


def advance_beams(request: Request, block_manager: BlockManager) -> None:
    """All beams have made their proposals: replace them by their heirs, or by the hypotheses at the end.

    A beam's first heir takes its place and keeps its blocks, the others fork from it, and a beam without
    heirs gives its blocks back. All forks come before any token is appended: they share the past.

        beams  A B C      heirs  B+x  A+y  B+z      B goes on as B+x, B+z is forked from it, C is freed
    """
    beams = list(request.live)
    search = request.beam_search
    heirs = search.advance(
        [beam.token_ids[request.num_prompt_tokens :] for beam in beams],
        [beam.cumulative_logprob for beam in beams],
        [beam.candidates for beam in beams],
    )
    if not heirs:
        _finish(request, beams, block_manager)
        return
    continued: set[int] = set()
    next_beams: list[tuple[Sequence, Sample]] = []
    for heir in heirs:
        beam = beams[heir.parent]
        if heir.parent in continued:
            beam = _add_child(request, beam, 0, block_manager)
        continued.add(heir.parent)
        next_beams.append((beam, heir.sample))
    for i, beam in enumerate(beams):
        if i not in continued:
            block_manager.free(beam)
    for index, (beam, sample) in enumerate(next_beams):
        beam.index, beam.candidates = index, None
        beam.append(sample)
    request.sequences = [beam for beam, _ in next_beams]
    request.live = list(request.sequences)


def _add_child(request: Request, parent: Sequence, index: int, block_manager: BlockManager) -> Sequence:
    child = parent.fork(index)
    block_manager.fork(parent, child)
    request.sequences.append(child)
    request.live.append(child)
    return child


def _finish(request: Request, beams: list[Sequence], block_manager: BlockManager) -> None:
    """The hypotheses, best first, become the request's outputs."""
    prompt = beams[0].token_ids[: request.num_prompt_tokens]
    for beam in beams:
        block_manager.free(beam)
    request.sequences, request.live = [], []
    for index, hypothesis in enumerate(request.beam_search.hypotheses):
        request.sequences.append(
            Sequence(
                request=request,
                token_ids=prompt + hypothesis.token_ids,
                index=index,
                cumulative_logprob=hypothesis.cumulative_logprob,
                detokenizer=beams[0].fork(0).detokenizer,
                score=hypothesis.score,
                finish_reason=hypothesis.finish_reason,
                stop_reason=hypothesis.stop_reason,
            )
        )
