"""Several sequences of one request: parallel sampling forks once, beam search at every step.

A fork takes no memory, because the child shares the parent's blocks. A sequence that writes into a
shared block gets a copy of it first (`BlockManager.append_slots`; PagedAttention, §4.4).

Beam search keeps the `beam_width` most likely unfinished texts, the beams. In each step every beam
proposes its most likely next tokens, its candidates. The best candidates of all beams become the
next beams, each forked from the beam that proposed it. A candidate that ends a text becomes a
hypothesis, which is a finished sequence with the score that transformers gives it:

    score = sum of the log-probabilities of the generated tokens / (their number ** length_penalty)
"""

from heapq import nlargest
from operator import attrgetter, itemgetter

from nanopaged.block_manager import BlockManager
from nanopaged.config import BeamSearchParams
from nanopaged.sequence import Request, Sample, Sequence


def fork_samples(request: Request, samples: list[Sample], block_manager: BlockManager) -> None:
    """Fork the sequence that has computed the prompt, once for each of the samples that follow it.

    The request gets its new sequences at the end, so a failed step leaves no fork without its
    token.
    """
    (parent,) = request.live
    siblings = []
    for index, sample in enumerate(samples):
        child = block_manager.fork(parent, index)
        siblings.append(child)
        if child.append(sample):  # it ends with its first token
            block_manager.free(child)
    block_manager.free(parent)
    request.sequences = siblings
    request.live = [seq for seq in siblings if not seq.finished]


def advance_beams(request: Request, block_manager: BlockManager) -> None:
    """Replace the beams by the next beams, or end the search. Every beam has proposed its
    candidates.

        beams  A B C      next beams  B+x  A+y  B+z      B+x and B+z share B's blocks, C's are freed

    The request gets its new sequences at the end. If the step fails before that, `start_over` finds
    the old beams with their tokens, and they propose the same candidates again.
    """
    params = request.params
    assert isinstance(params, BeamSearchParams)
    width = request.width
    beams = request.live
    candidates = []  # (log-probability of the whole text, the beam, the token that may follow it)
    for beam in beams:
        so_far = beam.cumulative_logprob
        for sample in beam.candidates or ():
            candidates.append((so_far + sample.logprob, beam, sample))
    candidates.sort(key=itemgetter(0), reverse=True)

    next_beams = []
    # A step that failed may have added longer hypotheses. They will be found again.
    hypotheses = [seq for seq in request.hypotheses if seq.num_tokens <= beams[0].num_tokens]
    for place, (logprob, beam, sample) in enumerate(candidates):
        if len(next_beams) == width:
            break
        child = block_manager.fork(beam, index=len(next_beams))
        if not child.append(sample):
            next_beams.append(child)
        else:  # it has ended
            block_manager.free(child)
            if place < width:  # as in transformers, any other text that ends is dropped
                child.score = logprob / child.num_output_tokens**params.length_penalty
                hypotheses.append(child)
    hypotheses = nlargest(width, hypotheses, key=attrgetter("score"))

    if next_beams and _is_over(params, hypotheses, next_beams[0]):
        beams = next_beams + beams
        next_beams = []
    for beam in beams:
        block_manager.free(beam)
    for index, hypothesis in enumerate(hypotheses):
        hypothesis.index = index
    request.hypotheses = hypotheses
    request.live = next_beams
    request.sequences = next_beams or hypotheses


def _is_over(params: BeamSearchParams, hypotheses: list[Sequence], best: Sequence) -> bool:
    """Whether the search has `beam_width` hypotheses, and the best next beam cannot improve them.

    With early_stopping "never" and a positive length penalty, a beam counts with the score that it
    would have at the maximum length.
    """
    if len(hypotheses) < params.beam_width:
        return False
    if params.early_stopping is True or params.beam_width == 1:  # a width of 1 is greedy decoding
        return True
    num_tokens = best.num_output_tokens
    if params.early_stopping == "never" and params.length_penalty > 0:
        request = best.request
        num_tokens = request.stop_rules.max_length - request.num_prompt_tokens
    worst = hypotheses[-1].score
    assert worst is not None
    return best.cumulative_logprob / num_tokens**params.length_penalty <= worst
