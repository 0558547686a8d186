"""Several sequences of one request: parallel sampling forks once, beam search at every step.

A fork costs no memory when it is made: the child shares the parent's blocks, and the first to write into a
shared block gets a copy of its own (`BlockManager.append_slots`).

Beam search keeps the `beam_width` most likely beginnings, the beams. At each step every beam proposes its
most likely next tokens, its candidates. The best of all candidates become the next beams, each forked from
the beam that proposed it, so one beam may go on as several and another not at all. A candidate that ends a
text becomes a hypothesis: a finished sequence with the score that transformers gives it,

    score = sum of the log-probabilities of the generated tokens / (their number ** length_penalty)
"""

from __future__ import annotations

from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Request, Sequence
from nanopaged.text.outputs import Sample


def fork_samples(request: Request, samples: list[Sample], block_manager: BlockManager) -> list[Sequence]:
    """The prompt is computed: go on with one sequence for each of the `samples` that may follow it.

    As in `advance_beams`, nothing of the request changes before the end. So there is never a fork without a
    token of its own, which would have to compute the prompt's last block again in a block of its own.
    """
    (parent,) = request.live
    siblings: list[Sequence] = []
    for index, sample in enumerate(samples):
        siblings.append(parent.fork(index))
        block_manager.fork(parent, siblings[-1])
        siblings[-1].append(sample)
    block_manager.free(parent)
    request.sequences, request.live = siblings, siblings[:]
    return siblings


def advance_beams(request: Request, block_manager: BlockManager) -> None:
    """Every beam has proposed its candidates: go on with the next beams, or end with the hypotheses.

        beams  A B C      next beams  B+x  A+y  B+z      B+x and B+z share B's blocks, those of C are freed

    Nothing of the request changes before the end, so that a step that fails on the way can be repeated.
    """
    beams, width, stop_token_ids = request.live, request.params.beam_width, request.stop_rules.token_ids
    candidates: list[tuple[float, Sequence, Sample]] = []
    for beam in beams:
        so_far = beam.cumulative_logprob
        candidates += [(so_far + sample.logprob, beam, sample) for sample in beam.candidates]
    candidates.sort(key=lambda candidate: candidate[0], reverse=True)
    at_limit = beams[0].num_tokens + 1 >= request.stop_rules.max_length

    hypotheses = list(request.hypotheses)
    for _, beam, sample in candidates[:width]:  # a worse one that ends is no hypothesis
        if at_limit or sample.token_id in stop_token_ids:
            hypotheses.append(_finish(beam, sample))
    hypotheses = sorted(hypotheses, key=lambda hypothesis: hypothesis.score, reverse=True)[:width]

    going_on = [candidate for candidate in candidates if candidate[2].token_id not in stop_token_ids][:width]
    next_beams: list[Sequence] = []
    if going_on and not at_limit and not _is_over(request, hypotheses, best=going_on[0][0]):
        for index, (_, beam, sample) in enumerate(going_on):
            next_beams.append(beam.fork(index))
            block_manager.fork(beam, next_beams[-1])
            next_beams[-1].append(sample)
    for beam in beams:  # the children hold references of their own
        block_manager.free(beam)
    for index, hypothesis in enumerate(hypotheses):
        hypothesis.index = index
    request.sequences, request.live, request.hypotheses = next_beams or hypotheses, next_beams[:], hypotheses


def _finish(beam: Sequence, sample: Sample) -> Sequence:
    """The beam's text with `sample` as its last token."""
    hypothesis = beam.fork(0)
    hypothesis.append(sample)
    hypothesis.score = _score(beam.request, hypothesis.cumulative_logprob, hypothesis.num_output_tokens)
    return hypothesis


def _score(request: Request, cumulative_logprob: float, num_tokens: int) -> float:
    return cumulative_logprob / num_tokens**request.params.length_penalty


def _is_over(request: Request, hypotheses: list[Sequence], best: float) -> bool:
    """Whether there are enough hypotheses and, by the rule asked for, no beam can improve them.

    early_stopping=True ends with the first `beam_width` hypotheses. False asks whether the best beam, were it
    to end now, would beat the worst hypothesis. "never" asks for the best score that it could still reach:
    its log-probability only falls, but a positive length penalty favours long texts, so it is taken at full
    length.
    """
    params = request.params
    if len(hypotheses) < params.beam_width:
        return False
    if params.early_stopping is True or params.beam_width == 1:  # a width of 1 is greedy decoding
        return True
    length = request.live[0].num_output_tokens + 1
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = request.stop_rules.max_length - request.num_prompt_tokens
    return _score(request, best, length) <= hypotheses[-1].score
