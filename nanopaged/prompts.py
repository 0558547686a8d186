"""From a prompt and its parameters to a checked request.

What this model or pool cannot serve is refused here, before it is queued.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

from nanopaged.config import EngineConfig, Params, SamplingParams, hint_for, is_whole, require
from nanopaged.sequence import Request
from nanopaged.text import Detokenizer, StopRules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | SequenceOf[int] | Mapping[str, Any]
"""A text, token ids, or a dict of {"prompt": text, "prompt_token_ids": ids} with one of them or both. Prompts
with different values of "cache_salt" in it share no K/V."""


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
        num_blocks: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.max_model_len = max_model_len
        self.vocab_size, self.num_blocks = vocab_size, num_blocks
        self.eos_token_ids = frozenset(
            token_id for token_id in eos_token_ids if token_id < vocab_size
        )
        self._seeds = random.Random(config.seed)

    def make_request(
        self, request_id: str, prompt: Prompt, params: Params | None = None
    ) -> Request:
        """A checked request, with a seed, which is not queued yet.

        Raises:
            TypeError, ValueError: it is empty, too long, not in the vocabulary, or could never be served.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, Params):
            got = f"{type(params).__name__}{hint_for(params)}"
            raise TypeError(f"params must be SamplingParams or BeamSearchParams, got {got}")
        text, content, salt = read_prompt(prompt)
        given = self.encode(content) if isinstance(content, str) else content
        token_ids = check_token_ids(given, self.vocab_size)
        require(len(token_ids) > 0, "the prompt is empty: it needs at least one token")
        rules = StopRules.of(params, len(token_ids), self.eos_token_ids, self.max_model_len)
        self._check(len(token_ids), params, rules)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        request = Request(request_id, text, token_ids, params, rules, seed, salt.encode())
        if self.tokenizer is not None:
            request.sequences[0].detokenizer = Detokenizer(
                self.tokenizer.backend_tokenizer, params.stop
            )
        return request

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: the model has no tokenizer, or the text is so long that it cannot fit (tokenising
                40 MB takes minutes).
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as a list of token ids")
        text.encode()  # half of a surrogate pair, which no tokenizer takes, is a ValueError
        if len(text) > self.max_model_len:  # or it surely fits, and the vocabulary is not measured
            most, longest = self.max_model_len, longest_token(self.tokenizer)
            if len(text) > 4 * most * longest:  # normalisation may join up to 4 characters into one
                what = (
                    f"the prompt has {len(text):,} characters, but max_model_len is {most} tokens"
                )
                raise ValueError(
                    f"{what}, which have at most {longest} characters each: shorten it"
                )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check(self, num_prompt_tokens: int, params: Params, rules: StopRules) -> None:
        """Raise ValueError if the request could never be served."""
        config, size, num_seqs = self.config, self.config.block_size, params.width
        if num_prompt_tokens >= self.max_model_len:
            what = f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {self.max_model_len}"
            raise ValueError(
                f"{what} with at least one to generate: shorten it, or raise max_model_len"
            )
        if num_seqs > (most := config.max_num_seqs):
            raise ValueError(
                f"the request is for {num_seqs} sequences, but max_num_seqs is {most}: ask less"
            )
        # The K/V of the last generated token is never read, so it needs no slot. Full blocks of the prompt
        # are shared by all sequences of the request.
        # block_size = 4, prompt 9, max_tokens 12, 3 sequences: 20 slots are 5 blocks, of which 2 are shared.
        # Needed are 2 + 3 · (5 - 2) = 11 blocks.
        shared = num_prompt_tokens // size
        needed = shared + num_seqs * (-(-(rules.max_length - 1) // size) - shared)
        if needed > self.num_blocks:
            what = f"a prompt of {num_prompt_tokens} tokens with max_tokens={params.max_tokens}"
            what += f" and {num_seqs} sequences" if num_seqs > 1 else ""
            what += f" may need {needed} blocks of {size} slots, but the whole pool has {self.num_blocks}"
            verb = "lower" if params.max_tokens else "set"
            raise ValueError(f"{what}: shorten it, {verb} max_tokens, or raise num_blocks")
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, and this model has none: use stop_token_ids"
            )
        if (wanted := max(params.logprobs or 0, params.prompt_logprobs or 0)) > self.vocab_size:
            raise ValueError(
                f"logprobs is {wanted}, but the vocabulary has {self.vocab_size} tokens"
            )
        check_token_ids(params.stop_token_ids, self.vocab_size, "stop token")
        if params.min_tokens > 0 and len(rules.token_ids) == self.vocab_size:
            what = f"min_tokens is {params.min_tokens}, but stop_token_ids has all {self.vocab_size} tokens"
            raise ValueError(
                f"{what} (end-of-sequence included): leave out one that may be drawn before"
            )


@lru_cache(maxsize=8)
def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))


def read_prompt(prompt: Any) -> tuple[str | None, Any, str]:
    """The text of a prompt, if it has one; what its tokens are made of (a text, or token ids); its salt.

    Raises ValueError unless a dict has a text or token ids, and nothing unknown.
    """
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else None, prompt, ""
    if "input_ids" in prompt:
        rows = token_rows(prompt)
        require(
            len(rows) == 1, f"these are the tokens of {len(rows)} texts: give them to LLM.generate"
        )
        return None, rows[0], ""
    if "role" in prompt:
        check_token_ids([prompt], 0)  # which says that messages are for chat
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if not prompt or unknown or not isinstance(text, str | None):
        keys = "a 'prompt' text or 'prompt_token_ids' (and may have a 'cache_salt')"
        raise ValueError(f"a prompt as a dict has {keys}, got {prompt!r}")
    if salt is not None and (not isinstance(salt, str) or salt == ""):
        raise ValueError(f"cache_salt must be a text that is not empty, got {salt!r}")
    return text, prompt.get("prompt_token_ids", text), salt or ""


def check_token_ids(token_ids: Any, vocab_size: int, what: str = "token") -> list[int]:
    """The ids as a list of ints, also if they come as an array or a tensor."""
    plain = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if not isinstance(plain, SequenceOf) or isinstance(plain, bytes):
        raise TypeError(f"a prompt is a str or a list of token ids, got {type(plain).__name__}")
    for token_id in plain:
        if not is_whole(token_id):
            if isinstance(token_id, Mapping) and "role" in token_id:
                raise ValueError(
                    f"messages are for chat: llm.chat(messages, params); got {token_id!r}"
                )
            raise TypeError(f"{what} ids must be ints, got {token_id!r} in the prompt")
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{what} id {token_id} is outside the vocabulary of {vocab_size} tokens"
            )
    return list(map(int, plain))


def token_rows(encoding: Mapping[str, Any]) -> list[list[int]]:
    """The token ids in the output of a transformers tokenizer: a row for each text, without padding."""
    given: list[Any] = [encoding["input_ids"], encoding.get("attention_mask")]
    ids, mask = (array.tolist() if hasattr(array, "tolist") else array for array in given)
    if not ids or not isinstance(ids[0], list):
        ids, mask = [ids], mask and [mask]
    if mask is None:
        return ids
    pairs = [zip(row, its_mask, strict=True) for row, its_mask in zip(ids, mask, strict=True)]
    return [[token_id for token_id, is_text in pair if is_text] for pair in pairs]


def pair_up(given: Any, params: Any) -> list[tuple[Prompt, Params | None]]:
    """Each prompt with its params. A single prompt is a list of one; single params are for all prompts."""
    if isinstance(given, Mapping) and "input_ids" in given:
        given = token_rows(given)
    elif isinstance(given, str | Mapping) or (hasattr(given, "tolist") and given.ndim < 2):
        given = [given]
    elif isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(
            f"prompts are a str, a list of token ids, or a list of such prompts, got {given!r}"
        )
    each: list[Any] = list(given)
    each = [each] if each and is_whole(each[0]) else each
    if params is None or isinstance(params, Params):
        return list(zip(each, repeat(params)))
    if isinstance(params, dict) or not isinstance(params, Iterable):
        got = f"{params!r}{hint_for(params)}"
        raise TypeError(
            f"sampling_params are SamplingParams, or a list with one for each prompt, got {got}"
        )
    if (num := len(params := list(params))) != len(each):
        given = f"there are {len(each)} prompts, but {num} sampling_params"
        raise ValueError(f"{given}: give one for all, or one each")
    return list(zip(each, params, strict=True))
