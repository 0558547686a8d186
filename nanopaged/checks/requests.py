"""Checks of a request against the limits of the model and the engine.

Each raises a TypeError or a ValueError that names the value, the limit and the way out, before anything is
queued. (`rules.py` checks what is wrong for any model.) This module knows the number of blocks, but no block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from numbers import Integral
from typing import Any

from nanopaged.checks.lengths import ResolvedConfig
from nanopaged.config import BeamSearchParams, SamplingParams

Params = SamplingParams | BeamSearchParams


Prompt = str | SequenceOf[int] | Mapping[str, Any]
"""A text, token ids, or a dict of {"prompt": text, "prompt_token_ids": ids} with one of them or both. Prompts
with different values of "cache_salt" in it share no K/V."""


def token_rows(encoding: Mapping[str, Any]) -> list[list[int]]:
    """The token ids in the output of a transformers tokenizer: a row for each text, without padding."""
    ids, mask = (_as_plain(encoding.get(name)) for name in ("input_ids", "attention_mask"))
    if not ids or not isinstance(ids[0], list):
        ids, mask = [ids], mask and [mask]
    if mask is None:
        return ids
    return [
        [token_id for token_id, is_text in zip(row, its_mask, strict=True) if is_text]
        for row, its_mask in zip(ids, mask, strict=True)
    ]


def _as_plain(values: Any) -> Any:
    """An array or a tensor as a list; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def pair_up(
    prompts: Prompt | SequenceOf[Prompt], params: Params | SequenceOf[Params] | None
) -> list[tuple[Prompt, Params | None]]:
    """Each prompt with its params. A single prompt is a list of one; single params are for all prompts."""
    prompts = _as_list(prompts)
    each: Any = [params] * len(prompts) if params is None or isinstance(params, Params) else params
    if isinstance(each, dict) or not isinstance(each, Iterable):
        raise TypeError(
            "sampling_params are SamplingParams, or a list with one for each prompt, got "
            f"{params!r}{write_params(params)}"
        )
    each = list(each)
    if len(each) != len(prompts):
        raise ValueError(
            f"there are {len(prompts)} prompts, but {len(each)} sampling_params: give one for all, "
            "or one each"
        )
    return list(zip(prompts, each, strict=True))


def _as_list(prompts: Any) -> list[Prompt]:
    """The prompts as a list; a single prompt (a text, or token ids) becomes a list of one."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return list(token_rows(prompts))
    if isinstance(prompts, str | Mapping) or (hasattr(prompts, "tolist") and prompts.ndim < 2):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts are a str, a list of token ids, or a list of such prompts, got {prompts!r}")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def check_beam_params(params: Any) -> None:
    """Raise TypeError unless these are `BeamSearchParams`, or several of them."""
    for each in params if isinstance(params, list | tuple) else [params]:
        if not isinstance(each, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(each).__name__}")


def check_types(request_id: Any, params: Any) -> None:
    """Raise TypeError unless these are an id and params."""
    if not isinstance(params, Params):
        got = f"{type(params).__name__}{write_params(params)}"
        raise TypeError(f"params must be SamplingParams or BeamSearchParams, got {got}")
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be a str, got {request_id!r}")


def write_params(params: Any) -> str:
    """What to write instead of a dict of params."""
    return f": write SamplingParams(**{params!r})" if isinstance(params, dict) else ""


def read_prompt(prompt: Any) -> tuple[str | None, Any, str]:
    """The text of a prompt, if it has one; what its tokens are made of (a text, or token ids); its salt.

    Raises ValueError unless a dict has a text or token ids, and nothing unknown.
    """
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else None, prompt, ""
    if "input_ids" in prompt:
        rows = token_rows(prompt)
        if len(rows) != 1:
            raise ValueError(f"these are the tokens of {len(rows)} texts: give them to LLM.generate")
        return None, rows[0], ""
    refuse_message(prompt)
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if not prompt or unknown or not isinstance(text, str | None):
        raise ValueError(
            "a prompt as a dict has a 'prompt' text or 'prompt_token_ids' (and may have a "
            f"'cache_salt'), got {prompt!r}"
        )
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt must be a text that is not empty, got {salt!r}")
    return text, prompt.get("prompt_token_ids", text), salt or ""


def refuse_message(item: object) -> None:
    """Raise ValueError if an item of a prompt is a chat message."""
    if isinstance(item, Mapping) and "role" in item:
        raise ValueError(f"messages are for chat: llm.chat(messages, params); got {item!r}")


def check_text(text: str, max_model_len: int, tokenizer: Any) -> None:
    """Raise ValueError if the text cannot fit, however it is tokenised: tokenising 40 MB takes minutes.

    Normalisation may join up to 4 characters into one.
    """
    if len(text) <= max_model_len:  # it surely fits, and the vocabulary need not be measured
        return
    longest = longest_token(tokenizer)
    if len(text) > 4 * max_model_len * longest:
        raise ValueError(
            f"the prompt has {len(text):,} characters, but max_model_len is {max_model_len} tokens, which "
            f"have at most {longest} characters each: shorten it"
        )


@lru_cache(maxsize=8)
def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))


def check_token_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """The ids as a list of ints, also if they come as an array or a tensor."""
    is_array = hasattr(token_ids, "tolist")
    if is_array:
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, SequenceOf) or isinstance(token_ids, bytes):
        got = repr(token_ids) if is_array else type(token_ids).__name__
        raise TypeError(f"a prompt is a str or a list of token ids, got {got}")
    if not token_ids:
        raise ValueError("the prompt is empty: it needs at least one token")
    for token_id in token_ids:
        refuse_message(token_id)
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise TypeError(f"token ids must be ints, got {token_id!r} in the prompt")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {vocab_size} tokens")
    return [int(token_id) for token_id in token_ids]


def check_fits(
    num_prompt_tokens: int,
    params: Params,
    max_length: int,
    config: ResolvedConfig,
    num_blocks: int,
) -> None:
    """Raise ValueError if the request could never be served.

    Args:
        max_length: tokens of the prompt and of the longest output.
        config: with `max_model_len` chosen.
        num_blocks: of the whole pool.
    """
    if num_prompt_tokens >= config.max_model_len:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {config.max_model_len} with "
            "at least one token to generate: shorten it, or raise max_model_len if the model allows more"
        )
    num_seqs = params.num_sequences
    if num_seqs > config.max_num_seqs:
        raise ValueError(
            f"the request is for {num_seqs} sequences, but max_num_seqs is {config.max_num_seqs}: "
            "ask for fewer, or raise max_num_seqs"
        )
    # The K/V of the last generated token is never read, so it needs no slot. Full blocks of the prompt are
    # shared by all sequences of the request.
    # block_size = 4, prompt 9, max_tokens 12, 3 sequences: 20 slots are 5 blocks, of which 2 are shared.
    # Needed are 2 + 3 · (5 - 2) = 11 blocks.
    block_size = config.block_size
    shared = num_prompt_tokens // block_size
    needed = shared + num_seqs * (-(-(max_length - 1) // block_size) - shared)
    if needed > num_blocks:
        what = f"a prompt of {num_prompt_tokens} tokens with max_tokens={params.max_tokens}"
        what += f" and {num_seqs} sequences" if num_seqs > 1 else ""
        verb = "set" if params.max_tokens is None else "lower"
        raise ValueError(
            f"{what} may need {needed} blocks of {block_size} slots, but the whole pool has {num_blocks}: "
            f"shorten it, {verb} max_tokens, or raise num_blocks"
        )


def check_params(
    params: Params, stop_token_ids: frozenset[int], vocab_size: int, has_tokenizer: bool
) -> None:
    """Raise ValueError if the params do not suit the model.

    Args:
        stop_token_ids: all tokens that end the output, the model's end-of-sequence ids included.
    """
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > vocab_size:
            raise ValueError(f"{name} is {wanted}, but the vocabulary has {vocab_size} tokens")
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise ValueError(f"stop token id {token_id} is outside the vocabulary of {vocab_size} tokens")
    if params.min_tokens > 0 and len(stop_token_ids) == vocab_size:
        raise ValueError(
            f"min_tokens is {params.min_tokens}, but stop_token_ids has all {vocab_size} tokens of the "
            "vocabulary (end-of-sequence included): leave out one that may be drawn before"
        )
