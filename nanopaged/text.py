"""Text: detokenising token by token, the rules that end an output, and chat templates.

Characters and stop strings may begin in one token and end in another. The promise is:

    - the text of an output is the tokenizer's decode of all its tokens, cut where a stop string
      begins;
    - what is shown while the output grows is a beginning of that text, so it is never taken back.

So an unfinished text leaves out its end while later tokens could still change it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from nanopaged.config import Params

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # a decoder's character for bytes that are not (yet) a whole character
WINDOW = 4  # tokens that are decoded again before new ones; they have all bytes of a character


@lru_cache(maxsize=4)
def special_and_byte_ids(tokenizer: Tokenizer) -> tuple[set[int], set[int | None]]:
    """The tokens that give no text, such as end-of-sequence, and the byte tokens <0x00> to <0xFF>.

    SentencePiece spells with byte tokens what its vocabulary lacks. A tokenizer that lacks one of
    them gives None for it.
    """
    added = tokenizer.get_added_tokens_decoder()
    special_ids = {token_id for token_id, token in added.items() if token.special}
    byte_ids = {tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return special_ids, byte_ids


class Detokenizer:
    """The text of one sequence's output, without special tokens. Copies share no state."""

    def __init__(self, tokenizer: Tokenizer, stop: SequenceOf[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""  # final, and cut before a stop string
        self._stopped = False  # whether a stop string was found
        self._num_read = 0  # output tokens read so far
        self._context: list[int] = []  # the last tokens whose text is in `text`
        self._waiting: list[int] = []  # byte tokens after them

    def find_stop(self, token_ids: list[int]) -> str | None:
        """Read the output so far. Returns the stop string that its last token completed, or None.

        The text is cut before the stop string that begins first. One that was complete before the
        last token does not count, because it came before `min_tokens`.

            stop = "END", text "...E", last token "ND.": the search begins len("END") - 1 = 2
            characters before the new text
        """
        num_searched = len(self._read(token_ids[:-1]))
        text = self._read(token_ids)
        first_stop = None
        first_begin = len(text)
        for stop in self.stop:
            begin = text.find(stop, max(0, num_searched - len(stop) + 1))
            if 0 <= begin < first_begin:
                first_stop = stop
                first_begin = begin
        if first_stop is not None:
            self.text = text[:first_begin]
            self._stopped = True
        return first_stop

    def visible(self, token_ids: list[int], finished: bool) -> str:
        """The text of the output `token_ids`, as far as it is final.

        An unfinished text leaves out an end that could still become another character, and as many
        characters as could begin the longest stop string.
        """
        if self._stopped:
            return self.text
        if finished:
            return self.tokenizer.decode(token_ids)
        self._read(token_ids)
        longest = max(map(len, self.stop), default=1)
        return self.text[: max(0, len(self.text) - longest + 1)]

    def _read(self, token_ids: list[int]) -> str:
        """Read the output's new tokens. Returns the text so far, with all whole characters.

        What no later token can change is added to `text`. Byte tokens at the end wait for the token
        after them, because a decoder reads a run of them as one text: an invalid byte after the
        three of "€" turns all four into REPLACEMENT.
        """
        special_ids, byte_ids = special_and_byte_ids(self.tokenizer)
        new = token_ids[self._num_read :]
        self._num_read += len(new)
        unread = self._waiting + [token_id for token_id in new if token_id not in special_ids]
        end = len(unread)
        while end > 0 and unread[end - 1] in byte_ids:
            end -= 1
        self.text += self._added(unread[:end])
        # New lists, because a copy may have the old ones.
        self._context = (self._context + unread[:end])[-WINDOW:]
        self._waiting = unread[end:]
        return self.text + self._added(self._waiting).rstrip(REPLACEMENT)

    def _added(self, token_ids: list[int]) -> str:
        """The text that tokens add to `text`, without a character that is not whole yet.

        Some decoders drop the space before a first word, so tokens are decoded after the ones
        before them:

            context "▁To" is "To", with "▁be" it is "To be": the text grows by " be"

        The context may begin with the second half of a character. Both texts then begin with the
        same REPLACEMENT, which their difference leaves out. Both may also end with half a
        character, which a later token completes. Its REPLACEMENT is removed.
        """
        if not token_ids:
            return ""
        before = self.tokenizer.decode(self._context).removesuffix(REPLACEMENT)
        text = self.tokenizer.decode(self._context + token_ids).removesuffix(REPLACEMENT)
        return text[len(before) :]


# ── what ends an output ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StopRules:
    """What ends the sequences of one request, apart from stop strings. Lengths include the prompt.

    Fields:
        token_ids: a sequence ends with any of these, the request's own and end-of-sequence tokens.
        min_length: below this length only `max_length` ends a sequence.
        max_length: at this length a sequence ends.
    """

    token_ids: frozenset[int]
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
        """The rules for a prompt of this length, and a model with these end-of-sequence tokens."""
        if params.ignore_eos:
            eos_token_ids = frozenset()
        max_length = num_prompt_tokens + (params.max_tokens or max_model_len)
        return cls(
            token_ids=eos_token_ids.union(params.stop_token_ids),
            min_length=num_prompt_tokens + params.min_tokens,
            max_length=min(max_length, max_model_len),
        )


# ── conversations ────────────────────────────────────────────────────────────────────────────────

Message = dict[str, Any]
OPTIONS = {"chat_template", "add_generation_prompt", "continue_final_message"}  # for any template
MARK = "\x01"  # a text that Python and JSON escape when they print a list


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: SequenceOf[Message],
    options: dict[str, Any] | None,
) -> str:
    """The text of a conversation in the model's own template, up to where its answer begins.

    Messages reach the template as they are. If it cannot take them so, parts become lines of one
    text, and a missing content becomes an empty one. (transformers leaves out what is None.)

    Args:
        options: of transformers' `apply_chat_template`, or of the template itself.

    Raises:
        TypeError, ValueError: the conversation is malformed or empty, no chat template works, or
            the template does not use an option.
    """
    options = options or {}
    if not all(isinstance(message, dict) for message in messages):
        raise TypeError(f"a conversation is a list of {{'role', 'content'}}, got {messages!r}")
    if not messages:
        raise ValueError("the conversation is empty: it needs at least one message")
    if tokenizer is None or not (options.get("chat_template") or tokenizer.chat_template):
        raise ValueError("this model has no chat template: use generate, or give 'chat_template'")
    texts = [message | {"content": _text_of(message)} for message in messages]
    defaults = {"add_generation_prompt": not options.get("continue_final_message")}
    render = partial(tokenizer.apply_chat_template, **defaults | options | {"tokenize": False})
    try:
        text = str(render(messages if _renders_parts(render, messages) else texts))
    except Exception as error:  # a template is a program, so it may raise anything
        raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error
    _check_options(tokenizer, options)
    return text


def _renders_parts(render: Callable[[Any], Any], messages: SequenceOf[Message]) -> bool:
    """Whether the template can take these messages as they are, with parts or without a content.

    Instead of looping over the parts, a template may fail, drop them, or print the list. So in a
    trial run the text of each part is a mark, and all marks must come out. If no message has parts,
    it is enough that the template does not fail.
    """
    num_parts = 0
    marked = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            num_parts += len(content)
            message = message | {"content": [{"type": "text", "text": MARK}] * len(content)}
        marked.append(message)
    try:
        return str(render(marked)).count(MARK) >= num_parts
    except Exception:
        return False


def _check_options(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> None:
    """Raise ValueError if an option has no effect, because the template does not use its name."""
    from jinja2 import Environment  # is not needed without a chat

    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    names = {text for _, kind, text in Environment().lex(template) if kind == "name"}
    for name, value in options.items():
        if value is not None and name not in names | OPTIONS:
            raise ValueError(
                f"the chat template does not use {name!r}: leave it out of the options, or give a "
                "template that uses it as 'chat_template'"
            )


def _text_of(message: Message) -> str:
    """The text of a message. Its content is a text, or a list of parts that become a line each."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if "role" not in message or not isinstance(content, str | list | tuple):
        raise ValueError(f"a message needs a 'role' and a 'content', got {message!r}")
    if isinstance(content, str):
        return content
    lines = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                lines.append(text)
            case _:
                raise ValueError(
                    f"a message may have parts {{'type': 'text', 'text': …}} only, got {part!r}"
                )
    return "\n".join(lines)
