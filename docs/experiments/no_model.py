"""A runner without a model, requests for it, and the lengths that the paper's traces have on average."""

from __future__ import annotations

import random

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.beam_search import BeamSearch
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult
from nanopaged.text.outputs import Sample
from nanopaged.text.stopping import StopRules

# The paper's traces (its Fig. 11): mean tokens of input and output.
TRACES = {"Alpaca-like": (19, 58), "ShareGPT-like": (161, 338)}


class NoModel:
    """A runner that answers at once with random tokens: what remains is scheduling and bookkeeping."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return StepResult([self._samples(seq) if seq.needs_sample else [] for seq in batch.sequences])

    def _samples(self, seq: Sequence) -> list[Sample]:
        request = seq.request
        if request.beam_search is None:
            num = request.params.num_sequences if request.prompt_phase else 1
            return [Sample(self.rng.randrange(32000), -1.0) for _ in range(num)]
        # Beams propose tokens whose probabilities fall off as in text: a few likely ones, a long tail.
        draws = [-self.rng.expovariate(0.5) for _ in range(request.num_candidates)]
        return [Sample(self.rng.randrange(32000), logprob) for logprob in draws]


def make_request(name: str, prompt: list[int], params: SamplingParams | BeamSearchParams) -> Request:
    rules = StopRules.of(params, len(prompt), frozenset(), max_model_len=1 << 20)
    search = BeamSearch(params, rules, len(prompt)) if isinstance(params, BeamSearchParams) else None
    seq = Sequence(list(prompt), len(prompt))
    return Request(name, None, prompt, params, rules, seed=0, sequences=[seq], beam_search=search)
