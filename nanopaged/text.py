"""Text: detokenising token by token, the rules that end an output, and chat templates.

Characters and stop strings may begin in one token and end in another. The promise is:

    - the text of an output is the tokenizer's decode of all its tokens, cut where a stop string begins;
    - what is shown while the output grows is a beginning of that text, so it is never taken back.

So an unfinished text leaves out its end while later tokens could still change it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nanopaged.config import Params

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"  # what bytes that are no character, or not yet, are decoded to
WINDOW = 4  # tokens that are decoded again before a new one: at least four bytes, as many as a character has


@lru_cache(maxsize=4)
def special_and_byte_ids(tokenizer: Tokenizer) -> tuple[set[int], set[int | None]]:
    """The tokens that give no text, such as end-of-sequence; and the byte tokens <0x00> to <0xFF>, in which
    SentencePiece spells what is not in its vocabulary (None for those that the tokenizer lacks)."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return special, {tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}


@dataclass
class Detokenizer:
    """The text of one sequence's output, without special tokens. Copies share no state."""

    tokenizer: Tokenizer
    stop: SequenceOf[str] = ()
    text: str = field(
        default="", init=False
    )  # what no later token can change, cut before a stop string
    _stopped: bool = field(default=False, init=False)  # whether one was found
    _num_read: int = field(default=0, init=False)  # output tokens decoded so far
    _num_searched: int = field(default=0, init=False)  # characters searched for stop strings
    _window: tuple[int, ...] = field(
        default=(), init=False
    )  # the last tokens: context for the next ones
    _num_shown: int = field(
        default=0, init=False
    )  # characters of the decoded window that are in `text`

    def find_stop(self, token_ids: list[int], look_for_stop: bool = True) -> str | None:
        """Decode the output so far; return the stop string that its last token completed, or None.

        The text is cut before the stop string that begins first.

            stop = "END", text "...E", last token "ND.": the search begins len("END") - 1 = 2 characters
            before the new text

        Args:
            look_for_stop: False only decodes (before `min_tokens`).
        """
        for new in filter(None, (token_ids[self._num_read : -1], token_ids[-1:])):
            begin = self._num_searched
            self._read(new)
            rest = self._decode(self._window)[self._num_shown :]
            # Complete characters count, even if another token could still change them.
            text = self.text + rest if HALF not in rest else self.text
            self._num_searched = len(text)
        if not look_for_stop:
            return None
        begins = {s: text.find(s, max(0, begin - len(s) + 1)) for s in self.stop}
        found = {s: begin for s, begin in begins.items() if begin >= 0}
        if not found:
            return None
        first = min(found, key=found.__getitem__)
        self.text, self._stopped = text[: found[first]], True
        return first

    def visible(self, token_ids: list[int], finished: bool) -> str:
        """The text of the output `token_ids`, as far as it is final.

        An unfinished text leaves out an end that could still become another character or a stop string.
        """
        if self._stopped:
            return self.text
        if finished:
            return self._decode(token_ids)
        self._read(token_ids[self._num_read :])
        longest = max(map(len, self.stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self.stop):
                return self.text[:-length]
        return self.text

    def _read(self, token_ids: list[int]) -> None:
        """Decode the next tokens, and add the characters that no later token can change to `text`.

        Some decoders drop the space before a first word, so tokens are decoded after the ones before them:

            window "▁To" is "To", window "▁To" "▁be" is "To be": the text grows by " be"

        Bytes that are no character yet become one HALF, which is left out. Byte tokens are one text together:
        after "€" (three of them) an invalid byte makes all four a HALF.
        """
        special_ids, byte_ids = special_and_byte_ids(self.tokenizer)
        self._num_read += len(token_ids)
        self._window += tuple(token_id for token_id in token_ids if token_id not in special_ids)
        end = len(self._window)
        while end > 0 and self._window[end - 1] in byte_ids:
            end -= 1
        text = self._decode(self._window[:end])
        num_final = len(text) - text.endswith(HALF)
        if num_final > self._num_shown:
            self.text += text[self._num_shown : num_final]
            self._num_shown = num_final
        if end > 2 * WINDOW:
            # A shorter window may begin in the middle of a character, but what was not shown is the same:
            # window "…쀤�" becomes "��쀤�", of which again all but the last character are shown.
            num_hidden = len(text) - self._num_shown
            self._window = self._window[end - WINDOW :]
            self._num_shown = len(self._decode(self._window[:WINDOW])) - num_hidden

    def _decode(self, token_ids: tuple[int, ...] | list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


# ── what ends an output ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends the sequences of one request, apart from stop strings. Lengths include the prompt.

    Fields:
        token_ids: a sequence ends with any of these.
        eos_token_ids: the end-of-sequence tokens among them, which give no `stop_reason`.
        min_length: below this length only `max_length` ends a sequence.
        max_length: at this length a sequence ends.
    """

    token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    min_length: int
    max_length: int

    @classmethod
    def of(
        cls,
        params: Params,
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> StopRules:
        """The rules for `params`, a prompt of this length, and a model with these end-of-sequence ids."""
        eos, own = (
            frozenset() if params.ignore_eos else eos_token_ids,
            frozenset(params.stop_token_ids),
        )
        max_length = min(num_prompt_tokens + (params.max_tokens or max_model_len), max_model_len)
        return cls(eos | own, eos - own, num_prompt_tokens + params.min_tokens, max_length)


# ── conversations ──────────────────────────────────────────────────────────────────────────────────────

Message = dict[str, Any]


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: SequenceOf[Message],
    options: dict[str, Any] | None,
) -> str:
    """The text of a conversation, in the model's own template; it ends where the model's answer begins.

    Args:
        options: of transformers' `apply_chat_template`, or of the template itself.

    Raises:
        TypeError, ValueError: the conversation is malformed or empty, or no chat template works.
    """
    if isinstance(messages, str) or not all(isinstance(message, dict) for message in messages):
        raise TypeError(
            f"a conversation is a list of {{'role': …, 'content': …}}, got {messages!r}"
        )
    if not messages:
        raise ValueError("the conversation is empty: it needs at least one message")
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: use generate")
    arguments: dict[str, Any] = {
        "add_generation_prompt": True,
        **(options or {}),
        "tokenize": False,
    }
    texts = [{**message, "content": _text_of(message)} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(texts, **arguments))
    except Exception as error:  # a template is a program: it may raise anything
        raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error


def _text_of(message: Message) -> str:
    """The text of a chat message, whose content is a text or a list of parts with a line of text each."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if "role" not in message or not isinstance(content, str | list | tuple):
        raise ValueError(f"a message needs a 'role' and a 'content', got {message!r}")
    if isinstance(content, str):
        return content
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise ValueError(
                f"a message may have parts {{'type': 'text', 'text': …}} only, got {part!r}"
            )
    return "\n".join(part["text"] for part in content)
