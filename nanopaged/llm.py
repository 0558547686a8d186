"""`LLM`: the API for scripts. It generates text for a list of prompts.

Several threads and streams may use one `LLM`: a thread holds the lock for one step, and every step serves the
requests of all. A call that ends early has its unfinished requests aborted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from itertools import count, starmap
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from nanopaged.config import BeamSearchParams, Params, SamplingParams, with_hints
from nanopaged.engine import FORKED, LLMEngine
from nanopaged.outputs import ForeignAttributes, RequestOutput
from nanopaged.prompts import Prompt, pair_up
from nanopaged.sequence import NonFiniteLogits, Request
from nanopaged.text import Message, render_chat

logger = logging.getLogger("nanopaged")


class LLM(ForeignAttributes):
    """Prompts in, texts out.

    llm = LLM()                                    # the tiny model in the box
    llm = LLM("Qwen/Qwen3-0.6B", block_size=16)    # a folder or a hub id; keywords are EngineConfig's

    Raises: as `EngineConfig` and `LLMEngine`.
    """

    engine_class = LLMEngine  # a fork's is another

    def __init__(self, model: str | Path | None = None, **config: Any) -> None:
        self.engine = self.engine_class(self.engine_class.make_config(model=model, **config))
        self._lock = (
            Lock()
        )  # for the engine. Only `with` takes it, so that no Ctrl-C leaves it taken
        self._door = Lock()  # held by a call while it waits for `_lock` to queue its requests
        self._count = count()
        self._dropped: list[Request] = []  # of calls that have ended; to be aborted

    def __repr__(self) -> str:
        engine, runner = self.engine, self.engine.runner
        dtype, device = str(runner.dtype).removeprefix("torch."), str(runner.device)
        blocks = f"{runner.num_blocks} blocks of {engine.config.block_size} tokens"
        return f"LLM(model={engine.model_name!r}, {dtype=}, {device=}, {blocks})"

    @with_hints(SamplingParams)
    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: Params | SequenceOf[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, with continuous batching; results in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of
                such prompts, or the output of a transformers tokenizer. {"prompt": text, "cache_salt": name}
                shares K/V only with prompts of that salt.
            sampling_params: one for all prompts, or a list with one for each. None is `SamplingParams()`.

        Raises:
            TypeError, ValueError: a prompt or its params cannot be served; no request has been queued then.
        """
        options = {} if use_tqdm else {"disable": True}  # without the option, TQDM_DISABLE=1 counts
        requests = self._make_requests(pair_up(prompts, sampling_params))
        try:
            self._queue(requests)
            with tqdm(total=len(requests), desc="Generating", unit="prompt", **options) as bar:
                for request in requests:
                    while not request.finished:
                        self._step(requests)
                        bar.update(min(len(self.engine.unreported), len(requests)) - bar.n)
        finally:
            self._drop(requests)
        for request in requests:
            if request.error is not None:
                raise request.error
        return list(map(Request.output, requests))

    @with_hints(BeamSearchParams)
    def beam_search(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: BeamSearchParams | SequenceOf[BeamSearchParams],
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The `beam_width` best continuations of each prompt, best first; see `BeamSearchParams`.

        Raises: as `generate`.
        """
        for each in params if isinstance(params, list | tuple) else [params]:
            if not isinstance(each, BeamSearchParams):
                raise TypeError(f"params must be BeamSearchParams, got {type(each).__name__}")
        return self.generate(prompts, params, use_tqdm)

    @with_hints(SamplingParams)
    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None
    ) -> Generator[RequestOutput]:
        """Generate for one prompt, yielding its state after every step that gave it a token.

        Leaving the loop early aborts the request.

        Raises: as `generate`, at the call, not at the first output.
        """
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | Mapping):
            raise TypeError(
                "stream takes one prompt: a str, a list of token ids, or a dict of one of them"
            )
        return self._stream(self._make_requests([(prompt, sampling_params)]))

    def _stream(self, requests: list[Request]) -> Generator[RequestOutput]:
        (request,), num_shown = requests, 0
        try:
            self._queue(requests)
            while True:
                if not request.finished:  # a step of another call may have finished it
                    self._step(requests)
                with self._lock:
                    output = request.output()
                if request.error is not None:
                    raise request.error
                num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
                if num_tokens > num_shown or output.finished:
                    num_shown = num_tokens
                    yield output
                if output.finished:
                    return
        finally:
            self._drop(requests)

    @with_hints(SamplingParams)
    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: Params | SequenceOf[Params] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, put into the model's own chat template.

        Args:
            messages: [{"role": "user", "content": "…"}, …], or a list of such lists.
            chat_template_kwargs: options of transformers' `apply_chat_template`, such as tools, or of the
                template itself: {"enable_thinking": False} for Qwen3.

        Raises:
            ValueError: the model has no chat template; or as `generate`.
        """
        given: Any = messages
        several = (
            isinstance(given, SequenceOf) and len(given) > 0 and isinstance(given[0], list | tuple)
        )
        prompts = [
            self.chat_prompt(each, chat_template_kwargs) for each in (given if several else [given])
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: SequenceOf[Message], chat_template_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """A conversation as a prompt for `generate` that ends where the model's answer begins.

        Returns:
            {"prompt": the text, "prompt_token_ids": its tokens}

        Raises:
            TypeError, ValueError: the conversation is malformed or empty, or the model has no chat template.
        """
        text = render_chat(self.engine.tokenizer, messages, chat_template_kwargs)
        token_ids = self.engine.prompts.encode(
            text, add_special_tokens=False
        )  # they are in the template
        return {"prompt": text, "prompt_token_ids": token_ids}

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer (of transformers), None if it has none."""
        return self.engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests: the next prompts are computed from their first token."""
        with self._lock:
            self.engine.reset_prefix_cache()

    # ── several threads and streams ───────────────────────────────────────────────────────────────────

    def _make_requests(self, pairs: list[tuple[Prompt, Params | None]]) -> list[Request]:
        """Checked requests without an id. (A tokenizer serves one thread at a time.)"""
        if os.getpid() != self.engine.pid:  # another thread may have held a lock when it was forked
            raise RuntimeError(FORKED.format(self.engine.pid))
        with self._door, self._lock:
            return list(starmap(partial(self.engine.prompts.make_request, ""), pairs))

    def _queue(self, requests: list[Request]) -> None:
        """Queue requests, each with an id that no unfinished request has."""
        with self._door, self._lock:
            for request in requests:
                while (
                    not request.request_id or request.request_id in self.engine.requests
                ):  # a user's own
                    request.request_id = f"llm-{next(self._count)}"
                self.engine.queue(request)

    def _step(self, mine: list[Request]) -> None:
        """A step of the engine. If the logits of another call's request are not finite, that call fails."""
        with self._door:  # let those go first who wait to queue requests: a lock alone is not fair
            pass
        with self._lock:
            try:
                self.engine.step(report=False)
            except NonFiniteLogits as error:
                request = self.engine.requests[error.request_id]
                if request in mine:
                    raise
                logger.warning("%s", error)
                request.error = error
                self.engine.scheduler.abort(request)
                self.engine.unreported[error.request_id] = request
        self._drop([])

    def _drop(self, requests: list[Request]) -> None:
        """Take requests out of the engine, and abort the unfinished ones.

        While another call uses the engine, they are left to the end of its step. That may be a call of this
        very thread: the garbage collector, which closes a stream, can run in the middle of a step.
        """
        self._dropped += requests
        while self._dropped and not self._lock.locked():
            with (
                self._lock,
                suppress(KeyboardInterrupt),
            ):  # a second Ctrl-C leaves none of them queued
                while self._dropped:
                    request = self._dropped[0]
                    if self.engine.requests.get(request.request_id) is request:
                        self.engine.forget(request)
                    self._dropped.remove(request)
