"""Wrong solutions of the exercises of chapter 2."""

WRONG_1 = [
    ("a step of its own for the first token", "[1] * (num_output - 1)", "[1] * num_output"),
    ("the last chunk is full", "min(budget, num_prompt - first)", "budget"),
    ("an empty chunk", "range(0, num_prompt, budget)", "range(0, num_prompt + 1, budget)"),
]
WRONG_2 = [
    ("rows only of decodes", "if end == num_tokens:", "if end == num_tokens and num_scheduled == 1:"),
    ("rows are numbers of sequences", "rows.append(len(slots) - 1)", "rows.append(len(rows))"),
    ("without the table", "table[position // block_size]", "(position // block_size)"),
]
WRONG_3 = [
    ("the K/V is kept", "stored = 0  #", "stored = stored  #"),
    ("the K/V of full blocks is kept", "stored = 0  #", "stored = stored // 4 * 4  #"),
    ("the generated tokens are lost", "stored = 0  #", "stored, known = 0, num_prompt  #"),
]
