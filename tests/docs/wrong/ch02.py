"""Wrong solutions of the exercises of chapter 2."""

CHUNKS = "min(budget, num_prompt - first) for first in range(0, num_prompt, budget)"

WRONG_1 = [
    ("a step of its own for the first token", "[1] * (num_output - 1)", "[1] * num_output"),
    ("no step for the last token", "[1] * (num_output - 1)", "[1] * (num_output - 2)"),
    ("the last chunk is full", "min(budget, num_prompt - first)", "budget"),
    ("an empty chunk", "range(0, num_prompt, budget)", "range(0, num_prompt + 1, budget)"),
    ("no chunks", CHUNKS, "num_prompt for _ in range(1)"),
    ("the rest of the prompt first", "range(0, num_prompt, budget)]", "range(0, num_prompt, budget)][::-1]"),
]
WRONG_2 = [
    ("a row for each sequence", "if end == num_tokens:", "if True:"),
    ("rows only of decodes", "if end == num_tokens:", "if end == num_tokens and num_scheduled == 1:"),
    ("rows are positions", "rows.append(len(slots) - 1)", "rows.append(end - 1)"),
    ("the row after the last token", "rows.append(len(slots) - 1)", "rows.append(len(slots))"),
    ("rows are numbers of sequences", "rows.append(len(slots) - 1)", "rows.append(len(rows))"),
    ("without the table", "table[position // block_size]", "(position // block_size)"),
]
WRONG_3 = [
    ("the failed step is left out", "return counts", "return counts[: fail_at - 1] + counts[fail_at:]"),
    ("the K/V is kept", "stored = 0  #", "stored = stored  #"),
    ("the step is repeated", "stored = 0  #", "stored -= counts[-1]  #"),
    ("the K/V of full blocks is kept", "stored = 0  #", "stored = stored // 4 * 4  #"),
    ("the generated tokens are lost", "stored = 0  #", "stored, known = 0, num_prompt  #"),
    ("the failed step's token is kept", "stored = 0  #", "known, stored = known + (stored == known), 0  #"),
]
