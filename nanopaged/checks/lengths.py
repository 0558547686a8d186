"""The options of an engine that depend on the model's longest sequence."""

from __future__ import annotations

from typing import Any

from nanopaged.config import EngineConfig

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


class ResolvedConfig(EngineConfig):
    """The options of an engine, with its lengths chosen: they are never None."""

    max_model_len: int
    max_num_batched_tokens: int


def resolve_lengths(config: EngineConfig, longest: int) -> ResolvedConfig:
    """The options with `max_model_len` and `max_num_batched_tokens` chosen.

    Args:
        longest: tokens of the longest sequence that the model was made for.

    Raises:
        ValueError: `max_model_len` is more than that; or prompts may not be cut into chunks, and the longest
            does not fit in one step.
    """
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}, but the model was made for at most {longest} tokens"
        )
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill:
        budget = budget or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_model_len)
        if budget < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, but without chunked prefill a prompt of up to "
                f"max_model_len = {max_model_len} tokens must fit in one step: raise "
                "max_num_batched_tokens, lower max_model_len, or set enable_chunked_prefill=True"
            )
    budget = budget or DEFAULT_MAX_NUM_BATCHED_TOKENS
    options: dict[str, Any] = vars(config)
    options = options | {"max_model_len": max_model_len, "max_num_batched_tokens": budget}
    return ResolvedConfig(**options)
