"""`LLM`: the API for scripts. It generates text for a list of prompts.

It makes requests, runs `LLMEngine.step` until they are finished, and returns their outputs. It knows no
blocks and no tensors. A server would use `LLMEngine` directly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from itertools import count
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from nanopaged.checks.foreign_names import ForeignAttributes, with_hints
from nanopaged.checks.requests import write_params
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.engine import LLMEngine
from nanopaged.prompts import Params, Prompt, token_rows
from nanopaged.sequence import NonFiniteLogits, Request
from nanopaged.text.chat import Message, render_chat
from nanopaged.text.outputs import RequestOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nanopaged.checks.engine_options import EngineOptions

logger = logging.getLogger("nanopaged")


def _as_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """The prompts as a list; a single prompt (a text, or token ids) becomes a list of one."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return token_rows(prompts)
    if isinstance(prompts, str | Mapping) or (hasattr(prompts, "tolist") and prompts.ndim < 2):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts are a str, a list of token ids, or a list of such prompts, got {prompts!r}")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


class LLM(ForeignAttributes):
    """Prompts in, texts out.

    llm = LLM()                                    # the tiny model in the box
    llm = LLM("Qwen/Qwen3-0.6B", block_size=16)    # a folder or a hub id; keywords are EngineConfig's

    Several threads may use it: their calls take turns, and so do the steps of streams. (`LLMEngine` is not
    thread-safe.)

    Raises: as `EngineConfig` and `LLMEngine`.
    """

    def __init__(self, model: str | Path | None = None, **config: Unpack[EngineOptions]) -> None:
        self.engine = LLMEngine(EngineConfig(model=model, **config))
        self._count = count()
        self._lock = Lock()
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
                such prompts. {"prompt": text, "cache_salt": name} shares K/V only with prompts of that salt.
                The output of a transformers tokenizer is taken, too: a prompt for each of its texts.
            sampling_params: one for all prompts, or a list with one for each. None is `SamplingParams()`.

        Raises:
            TypeError, ValueError: a prompt or its params cannot be served; no request has been queued then.
        """
        prompts, params = _as_list(prompts), sampling_params
        if params is None or isinstance(params, Params):
            params = [params] * len(prompts)
        if isinstance(params, dict) or not isinstance(params, Iterable):
            raise TypeError(
                "sampling_params are SamplingParams, or a list with one for each prompt, got "
                f"{params!r}{write_params(params)}"
            )
        params = list(params)
        if len(params) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts, but {len(params)} sampling_params: give one for all, "
                "or one each"
            )
        requests: list[Request] = []
        with self._serving(requests), self._lock:
            requests += [
                self.engine.prompts.make_request(self._new_id(), prompt, its_params)
                for prompt, its_params in zip(prompts, params, strict=True)
            ]
            self._run(requests, use_tqdm)
        return [request.output() for request in requests]

    def _new_id(self) -> str:
        return next(name for i in self._count if (name := f"llm-{i}") not in self.engine.requests)

    @contextmanager
    def _serving(self, requests: list[Request]) -> Iterator[None]:
        """However the block is left (error, Ctrl-C, a dropped generator), unfinished requests are aborted."""
        try:
            yield
        finally:
            queued = self.engine.requests
            self._abort([request for request in requests if queued.get(request.request_id) is request])

    def _abort(self, requests: list[Request]) -> None:
        """Abort requests; but while another call uses the engine, leave them to the end of that call.

        That may be a call of this very thread: Python's garbage collector, which closes a dropped generator,
        can run in the middle of a step. (Only `with` takes the lock, so that no Ctrl-C leaves it taken.)
        """
        self._dropped += requests
        while self._dropped and not self._lock.locked():
            # A second Ctrl-C must not leave some of them queued.
            with self._lock, suppress(KeyboardInterrupt):
                while self._dropped:
                    request = self._dropped[0]
                    if self.engine.requests.get(request.request_id) is request:
                        self.engine.abort_request(request.request_id)
                    self._dropped.remove(request)

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

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Queue the requests and step until all are done. A progress bar shows tokens per second."""
        queued, num_others = self.engine.requests, len(self.engine.requests)
        tokens_before = self.engine.scheduler.num_generated_tokens
        options = {} if use_tqdm else {"disable": True}  # without the option, TQDM_DISABLE=1 counts
        with tqdm(total=len(requests), desc="Generating", unit="prompt", **options) as bar:
            for request in requests:
                self._queue(request)
            first = 0  # the first one that is not done; looking at all of them in each step would take long
            while first < len(requests):
                self._step(requests)
                while first < len(requests) and requests[first].finished:
                    first += 1
                bar.update(max(first, len(requests) - max(0, len(queued) - num_others)) - bar.n)
                seconds = bar.format_dict["elapsed"]
                tokens = self.engine.scheduler.num_generated_tokens - tokens_before
                bar.set_postfix_str(f"{tokens / max(seconds, 1e-6):.0f} tokens/s", refresh=False)

    def _queue(self, request: Request) -> None:
        request.is_polled = True
        self.engine.queue(request)

    def _step(self, mine: list[Request]) -> None:
        """A step of the engine. If the logits of another call's request are not finite, that call fails."""
        try:
            self.engine.step(with_outputs=False, keep=True)
        except NonFiniteLogits as error:
            request = self.engine.requests[error.request_id]
            if request in mine:
                raise
            self.engine.abort_request(error.request_id)
            request.error = error
            if not request.is_polled:  # its owner gets its output from the next step of the engine
                logger.warning("%s", error)
                self.engine.requests[error.request_id] = request
                self.engine.scheduler.unreported.append(request)

    @with_hints(SamplingParams)
    def stream(self, prompt: Prompt, sampling_params: Params | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt, yielding its state after every step that gave it a token.

        The text grows from output to output; a character spread over several tokens appears when it is
        complete. Leaving the loop early aborts the request.

        Raises: as `generate`, at the call, not at the first output.
        """
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | Mapping):
            raise TypeError("stream takes one prompt: a str, a list of token ids, or a dict of one of them")
        with self._lock:
            request = self.engine.prompts.make_request("not queued yet", prompt, sampling_params)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        with self._serving([request]):
            with self._lock:
                request.request_id = self._new_id()
                self._queue(request)
            num_shown, output = 0, None
            while output is None or not output.finished:
                with self._lock:
                    if not request.finished:  # a step of another stream may have finished it
                        self._step([request])
                    output = request.output()
                self._abort([])
                if request.error is not None:
                    raise request.error
                num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
                if num_tokens > num_shown or output.finished:
                    num_shown = num_tokens
                    yield output

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
        many = (
            isinstance(messages, SequenceOf) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        )
        conversations = messages if many else [messages]
        prompts = [self.chat_prompt(conversation, chat_template_kwargs) for conversation in conversations]
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
        token_ids = self.engine.prompts.encode(text, add_special_tokens=False)  # they are in the template
        return {"prompt": text, "prompt_token_ids": token_ids}

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer (of transformers), None if it has none."""
        return self.engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests: the next prompts are computed from their first token."""
        with self._lock:
            self.engine.reset_prefix_cache()
