"""Text from tokens, as they come.

A token is not a piece of text: a character outside ASCII may be spread over several tokens, and a
stop string may begin in one token and end in another. So tokens go in one at a time, and text comes
out when it is whole. Where no stop string is to be found, tokens are put by until somebody wants to see
the text: while the host reads a GPU waits, and a whole text is read faster than its tokens one by one.
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
        self._unread: list[int] = []  # tokens whose text nobody has asked for
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # the tokens of the last piece of text …
        self._pending: list[int] = []  # … and those since

    def fork(self) -> Detokenizer:
        """One that goes on from the same text, independently.

        A stream cannot be copied, but what it will say next depends on its last few tokens only.
        """
        fork = Detokenizer(self.tokenizer, self.stop)
        fork.text, fork._unread = self.text, list(self._unread)
        fork._shown, fork._pending = list(self._shown), list(self._pending)
        for token_id in self._shown + self._pending:
            fork._stream.step(self.tokenizer, token_id)
        return fork

    def replay(self, token_ids: list[int]) -> Detokenizer:
        """A new one with the text of these tokens, stop strings or not."""
        replayed = Detokenizer(self.tokenizer)
        replayed._unread = list(token_ids)
        return replayed

    def push(self, token_id: int, look_for_stop: bool = True) -> str | None:
        """Add a token. Return the stop string that its text completed, if any."""
        self._unread.append(token_id)
        if not self.stop:
            return None
        old_length = len(self.text)
        self._read()
        if not look_for_stop or len(self.text) == old_length:
            return None
        return self._cut_at_stop(old_length)

    def _read(self) -> None:
        """Turn the tokens that were put by into text, as far as they make whole characters."""
        unread, self._unread = self._unread, []
        for token_id in unread:
            self._pending.append(token_id)
            piece = self._step(token_id)
            if piece:  # else there is nothing to show, or not yet a whole character
                self.text += piece
                self._shown, self._pending = self._pending, []

    def _step(self, token_id: int) -> str | None:
        """What the stream says to a token.

        It gives up where bytes that are no character would change what it has said (Llama 2: the bytes of
        "€", then the first of them again, decode to four replacement characters). What was said stands, and
        a new stream goes on from there; had nobody looked, the text would be what all of it decodes to.
        """
        try:
            return self._stream.step(self.tokenizer, token_id)
        except Exception:  # tokenizers has no type of its own for it
            self._stream, self._shown = DecodeStream(skip_special_tokens=True), []
            return "".join(self._stream.step(self.tokenizer, pending) or "" for pending in self._pending)

    def _read_at_once(self) -> None:
        """The same for a whole text that nothing will follow, unless it ends in half a character."""
        text = self.tokenizer.decode(self._unread, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self.text += text
            self._unread.clear()

    def _cut_at_stop(self, old_length: int) -> str | None:
        """Cut the text before the stop string that begins first, among those the new piece completed.

        stop = "END", old text "...E", piece "ND.": the search begins len("END") - 1 = 2 characters
        before the piece, where a stop string that was not complete before can begin at the earliest.
        """
        begins = {s: self.text.find(s, max(0, old_length - len(s) + 1)) for s in self.stop}
        found = {s: at for s, at in begins.items() if at >= 0}
        if not found:
            return None
        first = min(found, key=found.__getitem__)
        self.text = self.text[: found[first]]
        return first

    def visible(self, finished: bool) -> str:
        """What may be shown now: an unfinished text keeps back what might become a stop string."""
        if finished and not (self._shown or self._pending):
            self._read_at_once()
        self._read()
        if finished or not self.stop:
            return self.text
        longest = max(map(len, self.stop)) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self.stop):
                return self.text[:-length]
        return self.text
