"""The engine: requests in, one step after another, outputs out.

`LLMEngine.step` is the whole loop of a serving engine; the rest of the file checks what comes in and
tells what happened. For prompts in and texts out there is `llm.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as SequenceOf
from numbers import Integral
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from nanopaged.block_manager import BlockManager, blocks_needed
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.model.checkpoint import find_model, load_tokenizer, read_eos_token_ids
from nanopaged.model.model_config import read_model_config
from nanopaged.model_runner import ModelRunner
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch, StepResult
from nanopaged.stats import EngineStats
from nanopaged.text.detokenizer import Detokenizer
from nanopaged.text.outputs import RequestOutput
from nanopaged.text.stopping import StopRules

Prompt = str | SequenceOf[int]
Params = SamplingParams | BeamSearchParams


class Runner(Protocol):
    """What the engine needs of a model runner. `ModelRunner` is one; an experiment may bring its own."""

    num_blocks: int
    num_host_blocks: int

    def execute(self, batch: ScheduledBatch) -> StepResult: ...

    def cheaper_preemption(self) -> str: ...


class LLMEngine:
    """Continuous batching over a paged K/V cache.

    Args:
        config: see `EngineConfig`.
        runner: what carries out the steps; None loads the config's model.

    Raises:
        FileNotFoundError: the model or a file of it is missing.
        ValueError: the model is not supported or broken, or does not fit.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        self.config = config
        folder = find_model(config.model, with_weights=config.load_format == "auto")
        model_config = read_model_config(folder)
        self.tokenizer: PreTrainedTokenizerBase | None = load_tokenizer(folder)
        self.vocab_size = model_config.vocab_size
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        if self.max_model_len > model_config.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but the model was made for at most "
                f"{model_config.max_position_embeddings} tokens"
            )
        budget = config.step_budget(self.max_model_len)
        self.eos_token_ids = read_eos_token_ids(folder, self.tokenizer)
        self.runner: Runner = runner or ModelRunner(config, model_config, folder, self.max_model_len, budget)
        self.block_manager = BlockManager(
            self.runner.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager,
            config.max_num_seqs,
            budget,
            config.enable_chunked_prefill,
            self.runner.cheaper_preemption() if config.preemption == "auto" else config.preemption,
            self.runner.num_host_blocks,
        )
        self.requests: dict[str, Request] = {}  # the unfinished ones, in order of arrival
        self.num_steps = 0
        self._seeds = random.Random(config.seed)

    def step(self, with_outputs: bool = True) -> list[RequestOutput]:
        """Compute one batch. Returns the requests that got a token, finished or not.

        If anything fails, the exception passes through and nothing that was generated is lost: every request
        waits again, and the next step begins to compute their K/V anew. Abort the request that is to blame,
        or just go on.

        Args:
            with_outputs: False returns nothing, for a caller that reads its requests at the end, as
                `LLM.generate` does: to describe a few hundred requests takes longer than to schedule them.
        """
        if not self.requests:
            return []
        try:
            batch = self.scheduler.schedule()
            result = self.runner.execute(batch) if batch.sequences else StepResult([])
            advanced = self.scheduler.update(batch, result)
            outputs = [request.output() for request in advanced] if with_outputs else []
            for request in advanced:
                if request.finished:
                    del self.requests[request.request_id]
        except BaseException:
            self.scheduler.start_over(self.requests.values())
            raise
        self.num_steps += 1
        return outputs

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    def add_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> None:
        """Queue a prompt (text, or token ids) for generation.

        Raises:
            TypeError, ValueError: the prompt is empty, too long or not in the vocabulary, the id is
                taken, or the request could never be served; nothing is queued then.
        """
        self.queue(self.make_request(request_id, prompt, params))

    def make_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> Request:
        """Check a request against this engine and build it, without queueing it."""
        params = params if params is not None else SamplingParams()
        if not isinstance(params, Params):
            raise TypeError(f"params must be SamplingParams or BeamSearchParams, got {type(params).__name__}")
        self._check_id(request_id)
        token_ids = self._tokenize(prompt)
        self._check_fits(len(token_ids), params)
        self._check_params(params)
        rules = StopRules.of(params, len(token_ids), self.eos_token_ids, self.max_model_len)
        request = Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(token_ids),
            params=params,
            stop_rules=rules,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
        )
        if self.tokenizer is not None:
            request.sequences[0].detokenizer = Detokenizer(self.tokenizer.backend_tokenizer, params.stop)
        return request

    def queue(self, request: Request) -> None:
        """Put a request that was made into the waiting queue. Raises ValueError if its id is taken now."""
        self._check_id(request.request_id)
        request.arrival_time = time.monotonic()
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        if request_id in self.requests:
            raise ValueError(f"request_id {request_id!r} is taken by an unfinished request")

    def abort_request(self, request_id: str) -> RequestOutput:
        """Stop a request, wherever it is, and give its blocks back. Returns what it had got so far.

        Raises:
            ValueError: no unfinished request has this id.
        """
        if request_id not in self.requests:
            raise ValueError(f"no unfinished request has the id {request_id!r}")
        request = self.requests.pop(request_id)
        self.scheduler.abort(request)
        return request.output()

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything left to compute or to report."""
        return bool(self.requests)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give the prompt as a list of token ids")
            token_ids = self.tokenizer.encode(prompt)
        elif hasattr(prompt, "tolist"):  # an array or a tensor
            token_ids = prompt.tolist()
        elif isinstance(prompt, SequenceOf) and not isinstance(prompt, bytes):
            token_ids = list(prompt)
        else:
            raise TypeError(f"a prompt is a str or a list of token ids, got {type(prompt).__name__}")
        if token_ids == []:
            raise ValueError("the prompt is empty: it needs at least one token")
        if not isinstance(token_ids, list):
            raise TypeError(f"a prompt is a str or a list of token ids, got {prompt!r}")
        for token_id in token_ids:
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise TypeError(f"token ids must be ints, got {token_id!r} in the prompt")
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        return [int(token_id) for token_id in token_ids]

    def _check_fits(self, num_prompt_tokens: int, params: Params) -> None:
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {self.max_model_len} "
                "with at least one token to generate: shorten it, or raise max_model_len if the model "
                "allows more"
            )
        num_seqs = params.num_sequences
        if num_seqs > self.config.max_num_seqs:
            raise ValueError(
                f"the request is for {num_seqs} sequences, but max_num_seqs is {self.config.max_num_seqs}: "
                "ask for fewer, or raise max_num_seqs"
            )
        # The last token generated is never read back, so it needs no slot. Full blocks of the prompt are
        # shared by all of the request's sequences.
        block_size, num_blocks = self.config.block_size, self.block_manager.num_blocks
        longest = min(num_prompt_tokens + params.max_tokens, self.max_model_len) - 1
        shared = num_prompt_tokens // block_size if num_seqs > 1 else 0
        needed = shared + num_seqs * (blocks_needed(longest, block_size) - shared)
        if needed > num_blocks:
            what = f"a prompt of {num_prompt_tokens} tokens with max_tokens={params.max_tokens}"
            what += f" and {num_seqs} sequences" if num_seqs > 1 else ""
            raise ValueError(
                f"{what} may need {needed} blocks of {block_size} slots, but the whole pool has "
                f"{num_blocks}: shorten it, lower max_tokens, or raise num_blocks"
            )

    def _check_params(self, params: Params) -> None:
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > self.vocab_size:
                raise ValueError(f"{name} is {wanted}, but the vocabulary has {self.vocab_size} tokens")
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"stop token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
                )
        if params.min_tokens > 0 and len(set(params.stop_token_ids)) == self.vocab_size:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but stop_token_ids has all {self.vocab_size} tokens of "
                "the vocabulary: leave out one that may be drawn before"
            )

    # ── accounts ──────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> EngineStats:
        """The accounts as they stand between two steps."""
        return EngineStats.of(self.scheduler, self.num_steps)

    def check_invariants(self) -> None:
        """Raise AssertionError if the block manager's books and the tables disagree (for tests)."""
        self.block_manager.check_invariants(self.scheduler.sequences)
        self.scheduler.swapper.check_invariants(self.requests.values())
