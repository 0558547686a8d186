"""From a prompt and its parameters to a checked request.

What cannot be served is refused by `checks/requests.py`, before it is queued.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from nanopaged.checks.lengths import ResolvedConfig
from nanopaged.checks.requests import (
    Params,
    Prompt,
    check_fits,
    check_params,
    check_text,
    check_token_ids,
    check_types,
    read_prompt,
)
from nanopaged.config import SamplingParams
from nanopaged.sequence import Request
from nanopaged.text.detokenizer import Detokenizer
from nanopaged.text.stopping import StopRules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptProcessor:
    """Checks prompts and parameters against the limits of one engine, and turns them into requests.

    Args:
        num_blocks: blocks of the whole KV cache.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        num_blocks: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._seeds = random.Random(config.seed)

    def make_request(self, request_id: str, prompt: Prompt, params: Params | None = None) -> Request:
        """A checked request, with a seed, which is not queued yet.

        Raises:
            TypeError, ValueError: it is empty, too long, not in the vocabulary, or could never be served.
        """
        params = params if params is not None else SamplingParams()
        check_types(request_id, params)
        text, content, salt = read_prompt(prompt)
        token_ids = self.encode(content) if isinstance(content, str) else content
        token_ids = check_token_ids(token_ids, self.vocab_size)
        rules = StopRules.of(params, len(token_ids), self.eos_token_ids, self.config.max_model_len)
        check_fits(len(token_ids), params, rules.max_length, self.config, self.num_blocks)
        check_params(params, rules.token_ids, self.vocab_size, self.tokenizer is not None)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            stop_rules=rules,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            cache_salt=salt.encode(),
        )
        if self.tokenizer is not None:
            request.sequences[0].detokenizer = Detokenizer(self.tokenizer.backend_tokenizer, params.stop)
        return request

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: the model has no tokenizer, or the text is so long that it cannot fit.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as a list of token ids")
        text.encode()  # half of a surrogate pair, which no tokenizer takes, is a ValueError
        check_text(text, self.config.max_model_len, self.tokenizer)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
