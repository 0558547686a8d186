"""`LLM`: the API for scripts. It generates text for a list of prompts.

It makes requests, runs `LLMEngine.step` until they are finished, and returns their outputs. A server would
use `LLMEngine` directly.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from nanopaged.checks.foreign_names import ForeignAttributes, with_hints
from nanopaged.checks.requests import check_beam_params, pair_up
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.engine import LLMEngine
from nanopaged.prompts import Params, Prompt
from nanopaged.sequence import Request
from nanopaged.text.chat import Message, as_conversations, render_chat
from nanopaged.text.outputs import RequestOutput
from nanopaged.threads.turns import Turns
from nanopaged.views.outputs import request_output
from nanopaged.views.progress import progress_bar

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nanopaged.checks.engine_options import EngineOptions


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
        self._turns = Turns(self.engine)
        self._lock = self._turns.lock

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
        requests: list[Request] = []
        with self._turns.serving(requests), self._lock:
            requests += [
                self.engine.prompts.make_request(self._turns.new_id(), prompt, params)
                for prompt, params in pair_up(prompts, sampling_params)
            ]
            engine = self.engine
            with progress_bar(requests, engine.requests, engine.scheduler, use_tqdm) as some_are_unfinished:
                for request in requests:
                    self._turns.queue(request)
                while some_are_unfinished():
                    self._turns.step(requests)
        return [request_output(request) for request in requests]

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
        check_beam_params(params)
        return self.generate(prompts, params, use_tqdm)

    @with_hints(SamplingParams)
    def stream(self, prompt: Prompt, sampling_params: Params | None = None) -> Generator[RequestOutput]:
        """Generate for one prompt, yielding its state after every step that gave it a token.

        A character spread over several tokens appears when it is complete. Leaving the loop early aborts the
        request.

        Raises: as `generate`, at the call, not at the first output.
        """
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | Mapping):
            raise TypeError("stream takes one prompt: a str, a list of token ids, or a dict of one of them")
        with self._lock:  # it gets its id when it is queued
            request = self.engine.prompts.make_request("", prompt, sampling_params)
        return self._turns.stream(request)

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
        conversations = as_conversations(messages)
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
