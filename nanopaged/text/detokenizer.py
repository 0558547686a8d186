"""Detokenising: text from tokens, one token at a time.

A token is not always a whole piece of text: a character outside ASCII may be spread over several tokens, and
a stop string may begin in one token and end in another. So text is returned only up to the last complete
character. Without stop strings, tokens are decoded only when the text is read, to keep detokenising out of
the step.

The detokenizer has no tokens of its own: it gets the output tokens of a sequence with each call, and knows
how many of them it has decoded. It knows no sequences and no requests.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one sequence's output, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""  # complete characters only; cut before a stop string that was found
        self._num_read = 0  # output tokens decoded so far
        self._pending: list[int] = []  # decoded tokens that are not in `text` yet: part of a character
        self._stream = DecodeStream(skip_special_tokens=True)

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
            if not text.endswith("\ufffd"):
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
        """Decode the next tokens, and add the complete characters to `text`."""
        for token_id in token_ids:
            self._pending.append(token_id)
            try:
                piece = self._stream.step(self.tokenizer, token_id)
            except Exception:
                # A stream fails if invalid bytes would change the text that it has returned. (Llama 2: the
                # bytes of "€" and then the first of them again decode to four replacement characters.) Text
                # already returned is never changed; decoding restarts after it.
                self._stream = DecodeStream(skip_special_tokens=True)
                piece = "".join(self._stream.step(self.tokenizer, pending) or "" for pending in self._pending)
            if piece:
                self.text += piece
                self._pending = []
        self._num_read += len(token_ids)
