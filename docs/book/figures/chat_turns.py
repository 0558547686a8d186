"""Three turns of a chat: which tokens are found in the prefix cache, computed and generated.

    python docs/book/figures/chat_turns.py

The numbers are those of a run of the tiny model, the same as in docs/book/06-prefix-cache.md.
"""

from __future__ import annotations

from svg import COLORS, INK, Drawing

from nanopaged import LLM, SamplingParams

SYSTEM = (
    "The king sits in his hall at Westminster, with all his lords about him. "
    "He answers every man that speaks to him, and he answers in verse.\n"
)
QUESTIONS = [
    "\nMESSENGER:\nMy lord, the French are landed in the north.\n\nKING:\n",
    "\nMESSENGER:\nHow many men shall ride with us tonight?\n\nKING:\n",
    "\nMESSENGER:\nAnd who shall lead them, good my lord?\n\nKING:\n",
]
ANSWER = 24
LEFT, SCALE, ROW, HEIGHT = 70, 3.9, 62, 30


def main() -> None:
    llm = LLM(num_blocks=64)
    block_size = llm.engine.config.block_size
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    encode = llm.engine.prompts.encode
    conversation = encode(SYSTEM)
    ends: list[tuple[int, int, int]] = []  # in each turn: tokens found, of the prompt, with the answer
    for question in QUESTIONS:
        conversation = conversation + encode(question)
        (output,) = llm.generate([conversation], params, use_tqdm=False)
        ends.append((output.metrics.num_cached_tokens, len(conversation), len(conversation) + ANSWER))
        conversation = conversation + output.outputs[0].token_ids

    width = LEFT + round(SCALE * ends[-1][-1]) + 24
    drawing = Drawing(width, 52 + ROW * len(ends), "Tokens of three turns of a chat, with the prefix cache")
    for row, turn in enumerate(ends):
        y, begin = 22 + ROW * row, 0
        drawing.text(LEFT - 12, y + HEIGHT / 2, f"turn {row + 1}", anchor="end", bold=True)
        for end, what, (fill, line) in zip(turn, ("found", "computed", "generated"), COLORS, strict=False):
            if begin < end:
                length = SCALE * (end - begin)
                drawing.box(LEFT + SCALE * begin, y, length, HEIGHT, f"{end - begin} {what}", fill, line, 12)
            begin = end
        for place in range(0, turn[-1] + 1, block_size):
            x = LEFT + SCALE * place
            drawing.line(x, y + HEIGHT + 3, x, y + HEIGHT + 9, INK)
    note = f"The marks under a bar stand at multiples of the block size, {block_size} tokens."
    drawing.note(LEFT, 26 + ROW * len(ends), note)
    drawing.save()


if __name__ == "__main__":
    main()
