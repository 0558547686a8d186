"""From a prompt and its parameters to a checked request.

What this model or pool cannot serve is refused here, before it is queued.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from nanopaged.block_manager import blocks_needed
from nanopaged.config import EngineConfig, Params, SamplingParams, is_int
from nanopaged.sequence import Request
from nanopaged.text import Detokenizer, StopRules, special_and_byte_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | SequenceOf[int] | Mapping[str, Any]
"""A text, token ids, or a dict of {"prompt": text, "prompt_token_ids": ids} with one of them or
both. Prompts with different values of "cache_salt" in it share no K/V."""

MAX_TOKEN_LENGTH = 1024  # characters, more than any known tokenizer joins in one token


@dataclass
class PromptProcessor:
    """Checks prompts and parameters against the limits of one engine, and makes requests of them.

    Fields:
        num_blocks: blocks of the whole KV cache.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    config: EngineConfig
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        self.eos_token_ids &= frozenset(range(self.vocab_size))
        self._seeds = random.Random(self.config.seed)

    def make_request(
        self, request_id: str, prompt: Prompt, params: Params | None = None
    ) -> Request:
        """A checked request, with a seed, which is not queued yet.

        Raises:
            TypeError, ValueError: it is empty, too long, not in the vocabulary, or could never be
                served.
        """
        if params is None:
            params = SamplingParams()
        if not isinstance(params, Params):
            raise TypeError(
                f"params must be SamplingParams or BeamSearchParams, got {type(params).__name__}"
            )
        parts = prompt_as_dict(prompt)
        text = parts.get("prompt")
        token_ids = parts.get("prompt_token_ids")
        if token_ids is None and text is not None:
            token_ids = self.encode(text)
        token_ids = check_token_ids(token_ids, self.vocab_size)
        rules = StopRules.of(
            params,
            num_prompt_tokens=len(token_ids),
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.config.max_model_len,
        )
        self._check_lengths(len(token_ids), params, rules)
        self._check_params(params, rules)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            stop_rules=rules,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            cache_salt=(parts.get("cache_salt") or "").encode(),
        )
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer.backend_tokenizer, params.stop)
            request.sequences[0].detokenizer = detokenizer
        return request

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: the model has no tokenizer, or the text is so long that it cannot fit
                (tokenising 40 MB takes minutes).
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as a list of token ids")
        text.encode()  # raises ValueError for half of a surrogate pair, which no tokenizer takes
        if len(text) > MAX_TOKEN_LENGTH * self.config.max_model_len:
            raise ValueError(
                f"the prompt has {len(text):,} characters, but max_model_len is "
                f"{self.config.max_model_len} tokens of at most {MAX_TOKEN_LENGTH} characters: "
                "shorten it"
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_lengths(self, num_prompt_tokens: int, params: Params, rules: StopRules) -> None:
        """Raise ValueError if the prompt is empty, or too long for the model or the pool."""
        num_seqs = params.width
        if num_prompt_tokens == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        if num_prompt_tokens >= self.config.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is "
                f"{self.config.max_model_len}, with at least one token to generate: shorten the "
                "prompt"
            )
        if num_seqs > self.config.max_num_seqs:
            raise ValueError(
                f"the request is for {num_seqs} sequences, but max_num_seqs is "
                f"{self.config.max_num_seqs}: ask for fewer, or raise max_num_seqs"
            )
        # The K/V of the last generated token is never read, so it needs no slot. All sequences of
        # the request share the full blocks of the prompt. block_size = 4, prompt 9, max_tokens 12,
        # 3 sequences: 20 slots are 5 blocks, of which 2 are shared. Needed are 2 + 3 · (5 - 2) = 11
        # blocks.
        block_size = self.config.block_size
        num_shared = num_prompt_tokens // block_size
        num_own = blocks_needed(rules.max_length - 1, block_size) - num_shared
        num_needed = num_shared + num_seqs * num_own
        if num_needed > self.num_blocks:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens with max_tokens={params.max_tokens} and "
                f"{num_seqs} sequences may need {num_needed} blocks of {block_size} slots, but the "
                f"whole pool has {self.num_blocks}: shorten it, lower max_tokens, or add blocks"
            )

    def _check_params(self, params: Params, rules: StopRules) -> None:
        """Raise ValueError if the params ask for what this model does not have."""
        if params.stop:
            self._check_stop_strings(params.stop)
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name) or 0
            if number > self.vocab_size:
                raise ValueError(
                    f"{name} is {number}, but the vocabulary has {self.vocab_size} tokens"
                )
        check_token_ids(params.stop_token_ids, self.vocab_size, kind="stop token")
        if params.min_tokens > 0 and len(rules.token_ids) == self.vocab_size:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but stop_token_ids has all {self.vocab_size} "
                "tokens (end-of-sequence included): leave out one that may be drawn"
            )

    def _check_stop_strings(self, stop: SequenceOf[str]) -> None:
        """Raise ValueError if one of them can be in no output."""
        if self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, and this model has none: use stop_token_ids"
            )
        "".join(stop).encode()  # raises ValueError for half of a surrogate pair
        backend = self.tokenizer.backend_tokenizer
        for token_id in special_and_byte_ids(backend)[0]:
            token = backend.id_to_token(token_id)
            for text in stop:
                if token in text:
                    raise ValueError(
                        f"the stop string {text!r} has the special token {token!r} in it, which "
                        f"no text has: use stop_token_ids=[{token_id}]"
                    )


def prompt_as_dict(prompt: Any) -> Mapping[str, Any]:
    """A prompt of any form as {"prompt": …, "prompt_token_ids": …, "cache_salt": …}.

    Raises:
        ValueError: a dict has unknown keys, or something else than a text.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": prompt}
    if "input_ids" in prompt:
        prompt, *others = encoded_prompts(prompt)
        if others:
            raise ValueError(
                f"these are the tokens of {1 + len(others)} texts: give them to LLM.generate"
            )
    salt = prompt.get("cache_salt")
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if (
        unknown
        or not isinstance(prompt.get("prompt"), str | None)
        or not isinstance(salt, str | None)
        or salt == ""
    ):
        raise ValueError(
            "a prompt as a dict has a 'prompt' text or 'prompt_token_ids', and may have a "
            "'cache_salt' text that is not empty (messages are for chat: "
            f"llm.chat(messages, params)); got {prompt!r}"
        )
    return prompt


def check_token_ids(token_ids: Any, vocab_size: int, kind: str = "token") -> list[int]:
    """The ids as a list of ints, also if they come as an array or a tensor.

    Raises:
        TypeError: they are not a list, or one of them is not an int.
        ValueError: one of them is outside the vocabulary.
    """
    token_ids = as_list(token_ids)
    if not isinstance(token_ids, SequenceOf) or isinstance(token_ids, bytes):
        raise TypeError(f"a prompt is a str or a list of token ids, got {type(token_ids).__name__}")
    for token_id in token_ids:
        if not is_int(token_id):
            raise TypeError(
                f"{kind} ids must be ints, got {token_id!r} "
                "(messages are for chat: llm.chat(messages, params))"
            )
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{kind} id {token_id} is outside the vocabulary of {vocab_size} tokens"
            )
    return [int(token_id) for token_id in token_ids]


def encoded_prompts(encoding: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The texts in the output of a transformers tokenizer as prompts, without padding."""
    rows = as_rows(encoding["input_ids"])
    if "attention_mask" in encoding:
        masks = as_rows(encoding["attention_mask"])
        rows = [list(compress(row, mask)) for row, mask in zip(rows, masks, strict=True)]
    salt = encoding.get("cache_salt")
    return [{"prompt_token_ids": row, "cache_salt": salt} for row in rows]


def as_rows(array: Any) -> list[list[int]]:
    """A list of numbers, or of rows of them, or a tensor of either, as a list of rows."""
    rows = as_list(array)
    return rows if rows and isinstance(rows[0], list) else [rows]


def as_list(values: Any) -> Any:
    """The numbers of an array or a tensor as Python's; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def pair_up(prompts: Any, params: Any) -> list[tuple[Prompt, Params | None]]:
    """Each prompt with its params. A single prompt is a list of one; single params are for all."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        prompts = encoded_prompts(prompts)
    prompts = as_list(prompts)
    is_list = isinstance(prompts, SequenceOf) and not isinstance(prompts, str)
    if not is_list or (prompts and is_int(prompts[0])):  # a text, a dict, or token ids
        prompts = [prompts]
    if not isinstance(params, SequenceOf):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(
            f"there are {len(prompts)} prompts, but {len(params)} sampling_params: "
            "give one for all, or one for each"
        )
    return list(zip(prompts, params, strict=True))
