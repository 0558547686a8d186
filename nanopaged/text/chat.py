"""Conversations: a list of messages becomes a text, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


def as_conversations(messages: Any) -> SequenceOf[SequenceOf[Message]]:
    """One conversation or several, as several."""
    several = isinstance(messages, SequenceOf) and len(messages) > 0 and isinstance(messages[0], list | tuple)
    return messages if several else [messages]


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None, messages: SequenceOf[Message], options: dict[str, Any] | None
) -> str:
    """The text of a conversation, which ends where the model's answer begins.

    Args:
        options: of transformers' `apply_chat_template`, or of the template itself.

    Raises:
        TypeError, ValueError: the conversation is malformed or empty, or the model has no chat template.
    """
    if isinstance(messages, str) or not all(isinstance(message, dict) for message in messages):
        raise TypeError(f"a conversation is a list of {{'role': …, 'content': …}}, got {messages!r}")
    if not messages:
        raise ValueError("the conversation is empty: it needs at least one message")
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: use generate")
    arguments: dict[str, Any] = {"add_generation_prompt": True, **(options or {}), "tokenize": False}
    texts = [{**message, "content": text_of(message)} for message in messages]
    return str(tokenizer.apply_chat_template(texts, **arguments))


def text_of(message: Message) -> str:
    """The text of a chat message, whose content is a text or a list of parts with a line of text each."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if "role" not in message or not isinstance(content, str | list | tuple):
        raise ValueError(f"a message needs a 'role' and a 'content', got {message!r}")
    if isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"the content of a message may have parts {{'type': 'text', 'text': …}} only, got {part!r}"
            )
    return "\n".join(part["text"] for part in content)
