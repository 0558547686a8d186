"""The outputs of the API: texts, log-probabilities, metrics and statistics."""

from __future__ import annotations

from dataclasses import dataclass


class Logprob(float):
    """A token's natural-log probability. It is a float that also knows the token's rank (1 = most
    likely).

    The token's text is `llm.get_tokenizer().decode([token_id])`.
    """

    rank: int

    def __new__(cls, logprob: float, rank: int = 0) -> Logprob:
        self = super().__new__(cls, logprob)
        self.rank = rank
        return self

    @property
    def logprob(self) -> float:
        """The same number, under vLLM's name."""
        return float(self)


Logprobs = dict[int, Logprob]
"""For one position: token id → log-probability, of the most likely tokens and of the actual one."""


@dataclass
class CompletionOutput:
    """One of the outputs of a request.

    Fields:
        index: which of the request's outputs.
        text: the decoded tokens, special ones left out, cut before a stop string. While unfinished,
            it ends where no later token can change it.
        token_ids: all generated tokens, including the stop token.
        cumulative_logprob: sum of the generated tokens' log-probabilities (before temperature).
        logprobs: one dict for each generated token, if `SamplingParams.logprobs` is set.
        finish_reason: "stop", "length" (max_tokens or max_model_len), "abort"; None while
            unfinished.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
        score: of a finished beam: cumulative_logprob / (len(token_ids) ** length_penalty).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass
class RequestMetrics:
    """What happened to a request. Times are `time.monotonic()` seconds; None = not yet.

    Fields:
        arrival_time: when the request was queued.
        num_cached_tokens: prompt tokens found in the prefix cache when the request was admitted.
        num_preemptions: how often the request was preempted.
    """

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_cached_tokens: int
    num_preemptions: int


@dataclass
class RequestOutput:
    """The state of a request after a step; the last one has `finished=True`.

    It stays as it is while the request goes on.

    Fields:
        prompt: the text, if the prompt came as text or from `chat`.
        prompt_logprobs: one dict for each prompt token, None for the first, if wanted.
        outputs: one for each sequence: one until the prompt is computed; of a beam search, the
            beams while it runs and the best texts at its end.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; see `RequestMetrics`."""
        return self.metrics.num_cached_tokens


@dataclass
class Counters:
    """What the steps since the engine was made have done.

    A prompt counts once it is computed. A beam search generates `beam_width` tokens in each step.
    `prefix_cache_queries` counts the tokens of all prompts that were looked up in the prefix cache,
    and `prefix_cache_hits` those that were found.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions_swap: int = 0
    num_preemptions_recompute: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0


@dataclass(kw_only=True)
class EngineStats(Counters):
    """The counters, and counts and shares of blocks and queues now.

    `num_free_blocks` includes the cached blocks, because they can be evicted. `num_shared_blocks`
    counts the blocks that several block tables point to. `num_blocks_saved` is what sharing saves:
    the entries of all tables minus the blocks in use. `slot_utilization` is the share of the slots
    in used blocks that hold K/V. `num_running`, `num_waiting` and `num_swapped` count requests.
    `preemption` is the mode in use, "swap" or "recompute".
    """

    num_steps: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_shared_blocks: int
    num_blocks_saved: int
    num_host_blocks: int
    num_free_host_blocks: int
    slot_utilization: float
    num_running: int
    num_waiting: int
    num_swapped: int
    preemption: str
