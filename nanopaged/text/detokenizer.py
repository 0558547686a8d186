"""Detokenising: text from tokens, one token at a time.

A token is not always a whole piece of text: a character outside ASCII may be spread over several tokens, and
a stop string may begin in one token and end in another. So text is returned only up to the last complete
character. Without stop strings, tokens are decoded only when the text is read, to keep detokenising out of
the step.

The detokenizer has no tokens of its own: it gets the output tokens of a sequence with each call, and knows
how many of them it has decoded. It knows no sequences and no requests.
"""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer

HALF = "\ufffd"  # what bytes that are no character, or not yet, are decoded to


@lru_cache(maxsize=4)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that give no text, such as end-of-sequence."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """The text of one sequence's output, without special tokens. Copies share no state."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self._special_ids = special_ids(tokenizer)
        self.text = ""  # complete characters only; cut before a stop string that was found
        self._num_read = 0  # output tokens decoded so far
        self._shown: tuple[int, ...] = ()  # the last tokens whose text is in `text`: context for the next
        self._pending: tuple[int, ...] = ()  # decoded tokens that are not in `text` yet: part of a character

    def find_stop(self, token_ids: list[int], look_for_stop: bool = True) -> str | None:
        """Decode the output so far; return the stop string that its last token completed, or None.

        The text is cut before the stop string that begins first.

            stop = "END", text "...E", last token "ND.": the search begins len("END") - 1 = 2 characters
            before the new text, since a stop string that begins earlier would have been complete before

        Args:
            look_for_stop: False only decodes (before `min_tokens`).
        """
        self._read(token_ids[self._num_read : -1])
        old_length = len(self.text)
        self._read(token_ids[-1:])
        if not look_for_stop or len(self.text) == old_length:
            return None
        begins = {s: self.text.find(s, max(0, old_length - len(s) + 1)) for s in self.stop}
        found = {s: begin for s, begin in begins.items() if begin >= 0}
        if not found:
            return None
        first = min(found, key=found.__getitem__)
        self.text = self.text[: found[first]]
        return first

    def visible(self, token_ids: list[int], finished: bool) -> str:
        """The text of the output `token_ids`, as far as it is final.

        An unfinished text leaves out an end that could still become a stop string.
        """
        if finished and self._num_read == 0:  # decode everything at once, unless it ends in half a character
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            if not text.endswith(HALF):
                self.text, self._num_read = text, len(token_ids)
        self._read(token_ids[self._num_read :])
        if finished or not self.stop:
            return self.text
        longest = max(map(len, self.stop)) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self.stop):
                return self.text[:-length]
        return self.text

    def _read(self, token_ids: list[int]) -> None:
        """Decode the next tokens, and add the complete characters to `text`.

        Some decoders drop the space before a first word, so tokens are decoded after the ones before them:

            shown "▁To" is "To", shown + pending "▁To" "▁be" is "To be": the text grows by " be"
        """
        self._num_read += len(token_ids)
        for token_id in token_ids:
            if token_id in self._special_ids:
                continue
            self._pending += (token_id,)
            text, num_complete = self._piece(self._pending), len(self._pending)
            if text.endswith(HALF) and num_complete < 4:
                continue
            if text.endswith(HALF):
                # A character has at most 4 bytes, so these tokens begin with bytes that are none. They are
                # shown as such, up to where they can be told from the rest.
                first, rest = self._pending[:1], self._pending[1:]
                while len(rest) > 1 and self._piece(first) + self._decode(rest) != text:
                    first, rest = first + rest[:1], rest[1:]
                num_complete, text = len(first), self._piece(first)
            self.text += text
            self._shown, self._pending = self._pending[:num_complete], self._pending[num_complete:]

    def _piece(self, token_ids: tuple[int, ...]) -> str:
        """The text of tokens that follow the shown ones."""
        before, whole = self._decode(self._shown), self._decode(self._shown + token_ids)
        if whole.startswith(before):
            return whole[len(before) :]
        # Invalid bytes change what some decoders make of the bytes before them. (Llama 2: the bytes of "€"
        # and then the first of them again are four replacement characters.) Text is not changed once shown.
        return self._decode(token_ids)

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
