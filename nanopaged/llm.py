"""`LLM`: the API for scripts. It generates text for a list of prompts.

A call queues its requests in the engine and runs steps until they have ended. Streams of one thread
may be interleaved, because every step serves the requests of all of them. A call that ends early
aborts its unfinished requests.
"""

import os
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from nanopaged.config import BeamSearchParams, Params
from nanopaged.engine import LLMEngine
from nanopaged.outputs import RequestOutput
from nanopaged.prompts import Prompt, pair_up
from nanopaged.sequence import NonFiniteLogits, Request
from nanopaged.text import Message, render_chat


class LLM:
    """Prompts in, texts out.

    llm = LLM()                                    # the tiny model in the box
    llm = LLM("Qwen/Qwen3-0.6B", block_size=16)    # a folder or a hub id; keywords of EngineConfig

    An `LLM` serves one thread at a time: while a call of one thread is unfinished, a call of
    another one raises RuntimeError.

    Raises: as `EngineConfig` and `LLMEngine`.
    """

    engine_class = LLMEngine  # a fork replaces this class

    def __init__(self, model: str | Path | None = None, **config: Any) -> None:
        self.engine = self.engine_class(self.engine_class.make_config(model=model, **config))
        self._count = count()
        # The thread of each unfinished call: of one `generate`, or of several streams.
        self._callers: list[int] = []
        self._entry = Lock()  # held while a thread checks `_callers`, and adds itself

    def __repr__(self) -> str:
        runner = self.engine.runner
        return (
            f"LLM(model={self.engine.model_name!r}, dtype={runner.dtype}, device={runner.device}, "
            f"{runner.num_blocks} blocks of {self.engine.config.block_size} tokens)"
        )

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: Params | SequenceOf[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, with continuous batching; results in the prompts' order.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; or
                a list of such prompts, or the output of a transformers tokenizer. {"prompt": text,
                "cache_salt": name} shares K/V only with prompts of that salt.
            sampling_params: one for all prompts, or a list with one for each. None is
                `SamplingParams()`.

        Raises:
            TypeError, ValueError: a prompt or its params cannot be served; no request is queued
                then.
            RuntimeError: a call of another thread is unfinished.
        """
        # If it is None, tqdm shows a bar only on a terminal.
        disable = not use_tqdm or os.environ.get("TQDM_DISABLE") or None
        requests = self._make_requests(pair_up(prompts, sampling_params))
        with self._being_served(requests):
            for request in tqdm(requests, desc="Generating", unit="prompt", disable=disable):
                while not request.finished:  # a step serves all requests, also those of streams
                    self._step(requests)
        return [request.output() for request in requests]

    def beam_search(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: BeamSearchParams | SequenceOf[BeamSearchParams],
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The `beam_width` best continuations of each prompt, best first; see `BeamSearchParams`.

        Raises: as `generate`.
        """
        for _, item in pair_up(prompts, params):
            if not isinstance(item, BeamSearchParams):
                raise TypeError(f"params must be BeamSearchParams, got {type(item).__name__}")
        return self.generate(prompts, params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None
    ) -> Generator[RequestOutput]:
        """Generate for one prompt, and yield its output after each of its own steps with a token.

        Steps of other streams also serve it; their tokens come with its next own step. Leaving the
        loop early aborts the request.

        Raises: as `generate`, already when called. A stream counts as a call only from its first
            output on, where the RuntimeError of another thread can also come.
        """
        return self._stream(self._make_requests([(prompt, sampling_params)]))

    def _stream(self, requests: list[Request]) -> Generator[RequestOutput]:
        (request,) = requests
        with self._being_served(requests):
            while not request.finished:  # a step of another stream may have finished it
                advanced = self._step(requests)
                if request in advanced and not request.finished:
                    yield request.output()
            if request.error is not None:
                raise request.error
            yield request.output()

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
            chat_template_kwargs: options of the chat template, such as tools, or
                {"enable_thinking": False} for Qwen3. {"continue_final_message": True} goes on with
                an answer that was begun.

        Raises:
            ValueError: the model has no chat template, or it does not use one of the options; or
                as `generate`.
        """
        conversations: Any = messages
        if not any(isinstance(item, list | tuple) for item in conversations):
            conversations = [conversations]
        prompts = [self.chat_prompt(item, chat_template_kwargs) for item in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: SequenceOf[Message], chat_template_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """A conversation as a prompt for `generate` that ends where the model's answer begins.

        Returns:
            {"prompt": the text, "prompt_token_ids": its tokens}

        Raises:
            TypeError, ValueError: the conversation is malformed or empty, or the model has no chat
                template.
        """
        text = render_chat(self.engine.tokenizer, messages, chat_template_kwargs)
        # The template has written the special tokens already.
        token_ids = self.engine.prompts.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer (of transformers), None if it has none."""
        return self.engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests: the next prompts are computed from their first
        token.
        """
        self._check_thread()
        self.engine.reset_prefix_cache()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    # Nothing below is about paging: calls come from one thread, and may end early.

    def _make_requests(self, pairs: list[tuple[Prompt, Params | None]]) -> list[Request]:
        """Checked requests, which are not queued yet."""
        self._check_thread()
        return [
            self.engine.prompts.make_request(f"llm-{next(self._count)}", prompt, params)
            for prompt, params in pairs
        ]

    def _check_thread(self) -> None:
        """Raise RuntimeError while a call of another thread is unfinished."""
        if any(thread != get_ident() for thread in self._callers):
            raise RuntimeError(
                "another thread is using this LLM, which serves one thread at a time: "
                "put a lock around your calls, or send the prompts to one thread"
            )

    @contextmanager
    def _being_served(self, requests: list[Request]) -> Iterator[None]:
        """Around a call: queue its requests, and take them out of the engine at the end."""
        thread = get_ident()
        with self._entry:
            self._check_thread()
            self._callers.append(thread)
        try:
            for request in requests:
                self.engine.queue(request)
            yield
        finally:
            try:
                for request in requests:
                    self.engine.forget(request)
            finally:
                self._callers.remove(thread)

    def _step(self, requests: list[Request]) -> list[Request]:
        """Run a step of the engine. Returns the requests that got a token.

        If the logits of a request are not finite, only its own call fails.
        """
        try:
            return self.engine.run_step()
        except NonFiniteLogits as error:
            request = self.engine.requests.get(error.request_id)
            if request in requests:
                raise
            if request is not None:  # else its stream was closed during the step
                request.error = error
                with self.engine.changing():
                    self.engine.scheduler.abort(request)
            return []
