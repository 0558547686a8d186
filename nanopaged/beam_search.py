"""Several sequences of one request: parallel sampling forks once, beam search at every step.

A fork takes no memory: the child shares the parent's blocks. A sequence that writes into a shared block gets
a copy of it first (`BlockManager.append_slots`; PagedAttention, §4.4).

Beam search keeps the `beam_width` most likely unfinished texts, the beams. In each step every beam proposes
its most likely next tokens, its candidates. The best of all become the next beams, each forked from the beam
that proposed it. A candidate that ends a text becomes a hypothesis: a finished sequence, with the score that
transformers gives it,

    score = sum of the log-probabilities of the generated tokens / (their number ** length_penalty)
"""

from __future__ import annotations

from operator import attrgetter

from nanopaged.block_manager import BlockManager
from nanopaged.config import BeamSearchParams
from nanopaged.sequence import Request, Sample, Sequence


def fork_samples(request: Request, samples: list[Sample], block_manager: BlockManager) -> None:
    """Fork the sequence that has computed the prompt, once for each of the `samples` drawn to follow it.

    The request changes in one assignment at the end, so a failed step leaves no fork without its token.
    """
    (parent,) = request.live
    siblings: list[Sequence] = []
    for index, sample in enumerate(samples):
        siblings.append(block_manager.fork(parent, index))
        if siblings[-1].append(sample):  # it ends with its first token
            block_manager.free(siblings[-1])
    block_manager.free(parent)
    request.sequences, request.live = siblings, [seq for seq in siblings if not seq.finished]


def advance_beams(request: Request, block_manager: BlockManager) -> None:
    """Replace the beams by the next beams, or end the search. Every beam has proposed its candidates.

        beams  A B C      next beams  B+x  A+y  B+z      B+x and B+z share B's blocks, those of C are freed

    The request gets its new sequences in the last line: if the step fails before it, `start_over` finds the
    old beams with their tokens.
    """
    beams, width, stop_token_ids = request.live, request.width, request.stop_rules.token_ids
    candidates: list[tuple[float, Sequence, Sample]] = []
    for beam in beams:
        so_far = beam.cumulative_logprob
        candidates += [(so_far + sample.logprob, beam, sample) for sample in beam.candidates or ()]
    candidates.sort(key=lambda candidate: candidate[0], reverse=True)
    at_limit = beams[0].num_tokens + 1 >= request.stop_rules.max_length

    hypotheses = list(request.hypotheses)
    for _, beam, sample in candidates[
        :width
    ]:  # as in transformers, a candidate below these is no hypothesis
        if at_limit or sample.token_id in stop_token_ids:
            hypotheses.append(_finish(beam, sample))
    hypotheses = sorted(hypotheses, key=attrgetter("score"), reverse=True)[:width]

    going_on = [
        candidate for candidate in candidates if candidate[2].token_id not in stop_token_ids
    ][:width]
    next_beams: list[Sequence] = []
    if going_on and not at_limit and not _is_over(request, hypotheses, best=going_on[0][0]):
        for index, (_, beam, sample) in enumerate(going_on):
            next_beams.append(block_manager.fork(beam, index))
            next_beams[-1].append(sample)
    for beam in beams:  # the children have references of their own
        block_manager.free(beam)
    for index, hypothesis in enumerate(hypotheses):
        hypothesis.index = index
    request.sequences, request.live, request.hypotheses = (
        next_beams or hypotheses,
        next_beams[:],
        hypotheses,
    )


def _finish(beam: Sequence, sample: Sample) -> Sequence:
    """A hypothesis: the tokens of `beam`, ended by `sample`."""
    hypothesis = beam.copy_tokens(0)
    hypothesis.append(sample)
    hypothesis.score = _score(
        beam.request, hypothesis.cumulative_logprob, hypothesis.num_output_tokens
    )
    return hypothesis


def _score(request: Request, cumulative_logprob: float, num_tokens: int) -> float:
    assert isinstance(request.params, BeamSearchParams)
    return cumulative_logprob / num_tokens**request.params.length_penalty


def _is_over(request: Request, hypotheses: list[Sequence], best: float) -> bool:
    """Whether there are `beam_width` hypotheses and, by the `early_stopping` rule, no beam can improve them.

    "never": with a positive length penalty, the best beam could still improve up to the maximum length.

    Args:
        best: the cumulative log-probability of the best next beam.
    """
    params = request.params
    assert isinstance(params, BeamSearchParams)
    if len(hypotheses) < params.beam_width:
        return False
    if params.early_stopping is True or params.beam_width == 1:  # a width of 1 is greedy decoding
        return True
    length = request.live[0].num_output_tokens + 1
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = request.stop_rules.max_length - request.num_prompt_tokens
    worst = hypotheses[-1].score
    assert worst is not None
    return _score(request, best, length) <= worst
