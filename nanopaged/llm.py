"""The front end for someone who has prompts and wants texts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from nanopaged.config import BeamSearchParams, EngineConfig
from nanopaged.engine import LLMEngine, Params, Prompt
from nanopaged.outputs import RequestOutput
from nanopaged.sequence import Request

Message = dict[str, str]


@contextmanager
def _aborting(engine: LLMEngine, requests: list[Request]) -> Iterator[None]:
    """Whatever ends the block, an error, Ctrl-C or a generator let go, leaves none of `requests` behind."""
    try:
        yield
    finally:
        for request in requests:
            if request.request_id in engine.requests:
                engine.abort_request(request.request_id)


def _as_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """One prompt, a text or token ids, becomes a list of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]
    return list(prompts)


class LLM:
    """Prompts in, texts out.

    llm = LLM()                                    # the tiny model in the box
    llm = LLM("Qwen/Qwen3-0.6B", block_size=16)    # a folder or a hub id; keywords are EngineConfig's

    Raises: as `EngineConfig` and `LLMEngine`.
    """

    def __init__(self, model: str | Path | None = None, **config: Any) -> None:
        self.engine = LLMEngine(EngineConfig(model=model, **config))
        self._ids = (f"llm-{i}" for i in count())

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: Params | SequenceOf[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, all in one continuous batch; results in the prompts' order.

        Args:
            params: for all prompts, or one for each.

        Raises:
            TypeError, ValueError: a prompt or its params cannot be served; then nothing has been run.
        """
        prompts = _as_list(prompts)
        if params is None or isinstance(params, Params):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts, but {len(params)} params: give one for all, or one each"
            )
        requests = [
            self.engine.make_request(next(self._ids), prompt, its_params)
            for prompt, its_params in zip(prompts, params, strict=True)
        ]
        for request in requests:
            self.engine.queue(request)
        with _aborting(self.engine, requests):
            self._run(requests, use_tqdm)
        return [RequestOutput.of(request) for request in requests]

    def beam_search(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: BeamSearchParams | SequenceOf[BeamSearchParams],
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The `beam_width` best continuations of each prompt, best first; see `BeamSearchParams`.

        Raises: as `generate`.
        """
        for each in [params] if isinstance(params, Params) else params:
            if not isinstance(each, BeamSearchParams):
                raise TypeError(f"params must be BeamSearchParams, got {type(each).__name__}")
        return self.generate(prompts, params, use_tqdm)

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until all `requests` are done, with a bar that tells the tokens per second."""
        done = 0
        bar = tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm)
        tokens_before = self.engine.scheduler.num_generated_tokens
        with bar:
            while done < len(requests):
                self.engine.step()
                finished = sum(request.finished for request in requests)
                bar.update(finished - done)
                done = finished
                seconds = bar.format_dict["elapsed"]
                tokens = self.engine.scheduler.num_generated_tokens - tokens_before
                bar.set_postfix_str(f"{tokens / max(seconds, 1e-6):.0f} tokens/s", refresh=False)

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt, yielding its state after every step that gave it a token.

        The text grows from one to the next; a character spread over several tokens appears when it is
        whole. Leaving the loop early aborts the request.
        """
        return self._stream(self.engine.make_request(next(self._ids), prompt, params))

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        self.engine.queue(request)
        with _aborting(self.engine, [request]):
            shown, finished = 0, False
            while not finished:
                if not request.finished:  # or the steps of another consumer have finished this one, too
                    self.engine.step()
                num_tokens = sum(seq.num_output_tokens for seq in request.sequences)
                finished = request.finished
                if num_tokens > shown or finished:
                    shown = num_tokens
                    yield RequestOutput.of(request)

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: Params | SequenceOf[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, put into the model's own chat template.

        Args:
            messages: [{"role": "user", "content": "…"}, …], or a list of such lists.

        Raises:
            ValueError: the model has no chat template; or as `generate`.
        """
        many = bool(messages) and not isinstance(messages[0], dict)
        conversations = messages if many else [messages]
        prompts = [self.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, params, use_tqdm)

    def chat_prompt(self, messages: SequenceOf[Message]) -> list[int]:
        """A conversation as token ids, up to where the model's answer begins."""
        if not messages:
            raise ValueError("the conversation is empty: it needs at least one message")
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: use generate")
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)
