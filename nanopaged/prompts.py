"""From a prompt and its parameters to a checked request.

A request is checked here against the limits of the model and the engine, before it is queued. Each error
names the value, the limit and the way out. (`config.py` checks what is wrong for any model.) This module
knows the number of blocks, but no block and no queue.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from numbers import Integral
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.sequence import Request
from nanopaged.text.detokenizer import Detokenizer
from nanopaged.text.stopping import StopRules

Prompt = str | SequenceOf[int] | dict[str, Any]
"""A text, token ids, or a dict of {"prompt": text, "prompt_token_ids": ids} with one of them or both. Prompts
with different values of "cache_salt" in it share no K/V."""
Params = SamplingParams | BeamSearchParams


def token_rows(encoding: Mapping[str, Any]) -> list[list[int]]:
    """The token ids in the output of a transformers tokenizer: a row for each text, without padding."""
    ids, mask = (
        value.tolist() if hasattr(value, "tolist") else value
        for value in (encoding["input_ids"], encoding.get("attention_mask"))
    )
    if not ids or not isinstance(ids[0], list):
        ids, mask = [ids], mask and [mask]
    if mask is None:
        return ids
    return [
        [token_id for token_id, is_text in zip(row, its_mask, strict=True) if is_text]
        for row, its_mask in zip(ids, mask, strict=True)
    ]


def refuse_message(item: object) -> None:
    """Raise ValueError if an item of a prompt is a chat message."""
    if isinstance(item, Mapping) and "role" in item:
        raise ValueError(f"messages are for chat: llm.chat(messages, params); got {item!r}")


class PromptProcessor:
    """Checks prompts and parameters against the limits of one engine, and turns them into requests.

    Args:
        num_blocks: blocks of the whole KV cache.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        max_model_len: int,
        num_blocks: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._seeds = random.Random(config.seed)

    def make_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> Request:
        """A checked request, with a seed, which is not queued yet.

        Raises:
            TypeError, ValueError: the prompt is empty, too long or not in the vocabulary, or the request
                could never be served.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, Params):
            hint = f": write SamplingParams(**{params!r})" if isinstance(params, dict) else ""
            got = type(params).__name__
            raise TypeError(f"params must be SamplingParams or BeamSearchParams, got {got}{hint}")
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        text, salt = prompt if isinstance(prompt, str) else None, None
        refuse_message(prompt)
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            rows = token_rows(prompt)
            if len(rows) != 1:
                raise ValueError(f"these are the tokens of {len(rows)} texts: give them to LLM.generate")
            prompt = rows[0]
        elif isinstance(prompt, Mapping):
            text, salt = prompt.get("prompt"), prompt.get("cache_salt")
            unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
            if not prompt or unknown or not isinstance(text, str | None):
                raise ValueError(
                    "a prompt as a dict has a 'prompt' text or 'prompt_token_ids' (and may have a "
                    f"'cache_salt'), got {prompt!r}"
                )
            prompt = prompt.get("prompt_token_ids", text)
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise ValueError(f"cache_salt must be a text that is not empty, got {salt!r}")
        token_ids = self._tokenize(prompt)
        stop_rules = StopRules.of(params, len(token_ids), self.eos_token_ids, self.max_model_len)
        self._check_fits(len(token_ids), params, stop_rules.max_length)
        self._check_params(params, stop_rules)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            stop_rules=stop_rules,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            cache_salt=(salt or "").encode(),
        )
        if self.tokenizer is not None:
            request.sequences[0].detokenizer = Detokenizer(self.tokenizer.backend_tokenizer, params.stop)
        return request

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: the model has no tokenizer, or the text is so long that it cannot fit. (Tokenising
                40 MB would take minutes.)
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as a list of token ids")
        text.encode()  # half of a surrogate pair, which no tokenizer takes, is a ValueError
        # Normalisation may join up to 4 characters into one.
        if len(text) > 4 * self.max_model_len and len(text) > 4 * self.max_model_len * self._longest_token:
            raise ValueError(
                f"the prompt has {len(text):,} characters, but max_model_len is {self.max_model_len} tokens, "
                f"which have at most {self._longest_token} characters each: shorten it"
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.encode(prompt)
        elif hasattr(prompt, "tolist"):  # an array or a tensor
            token_ids = prompt.tolist()
        elif isinstance(prompt, SequenceOf) and not isinstance(prompt, bytes):
            token_ids = list(prompt)
        else:
            raise TypeError(f"a prompt is a str or a list of token ids, got {type(prompt).__name__}")
        if not isinstance(token_ids, list):
            raise TypeError(f"a prompt is a str or a list of token ids, got {prompt!r}")
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        for token_id in token_ids:
            refuse_message(token_id)
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise TypeError(f"token ids must be ints, got {token_id!r} in the prompt")
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        return [int(token_id) for token_id in token_ids]

    def _check_fits(self, num_prompt_tokens: int, params: Params, max_length: int) -> None:
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
        # The K/V of the last generated token is never read, so it needs no slot. Full blocks of the prompt
        # are shared by all sequences of the request.
        # block_size = 4, prompt 9, max_tokens 12, 3 sequences: 20 slots are 5 blocks, of which 2 are shared.
        # Needed are 2 + 3 · (5 - 2) = 11 blocks.
        block_size = self.config.block_size
        shared = num_prompt_tokens // block_size
        needed = shared + num_seqs * (-(-(max_length - 1) // block_size) - shared)
        if needed > self.num_blocks:
            what = f"a prompt of {num_prompt_tokens} tokens with max_tokens={params.max_tokens}"
            what += f" and {num_seqs} sequences" if num_seqs > 1 else ""
            raise ValueError(
                f"{what} may need {needed} blocks of {block_size} slots, but the whole pool has "
                f"{self.num_blocks}: shorten it, lower max_tokens, or raise num_blocks"
            )

    def _check_params(self, params: Params, stop_rules: StopRules) -> None:
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
        if params.min_tokens > 0 and len(stop_rules.token_ids) == self.vocab_size:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but stop_token_ids has all {self.vocab_size} tokens of "
                "the vocabulary (end-of-sequence included): leave out one that may be drawn before"
            )
