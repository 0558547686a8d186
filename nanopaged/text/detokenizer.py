"""Text from tokens, as they come.

A token is not a piece of text: a character outside ASCII may be spread over several tokens, and a stop string
may begin in one token and end in another. So tokens are read one at a time, and text appears when its
characters are whole. Without stop strings the tokens are read when the text is asked for, which keeps
detokenising out of the step.

The detokenizer keeps no tokens of its own: it is given the sequence's output and remembers how far it has
read.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one sequence's output, special tokens left out."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""  # whole characters only; ends before the stop string once one was found
        self._num_read = 0  # output tokens that were read
        self._pending: list[int] = []  # those of them that are not in `text` yet: part of a character
        self._stream = DecodeStream(skip_special_tokens=True)

    def find_stop(self, token_ids: list[int], look_for_stop: bool = True) -> str | None:
        """Read the output so far; return the stop string that its last token completed, if any.

        The text is cut before the stop string that begins first.

            stop = "END", text "...E", last token "ND.": the search begins len("END") - 1 = 2 characters
            before the new piece, where a stop string that was not complete before can begin at the earliest.
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
        """The text of the output `token_ids` that may be shown.

        An unfinished text leaves out an end that could still become a stop string.
        """
        if finished and self._num_read == 0:  # the whole text at once, unless it ends in half a character
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
        """Add the text of the next tokens, as far as they make whole characters."""
        for token_id in token_ids:
            self._pending.append(token_id)
            try:
                piece = self._stream.step(self.tokenizer, token_id)
            except Exception:
                # A stream fails if bytes that are no character would change the text that it has returned
                # (Llama 2: the bytes of "€", then the first of them again, decode to four replacement
                # characters). Text already returned is never changed; decoding restarts after it.
                self._stream = DecodeStream(skip_special_tokens=True)
                piece = "".join(self._stream.step(self.tokenizer, pending) or "" for pending in self._pending)
            if piece:
                self.text += piece
                self._pending = []
        self._num_read += len(token_ids)
