"""Wrong solutions of the exercises of chapter 2."""

WRONG_1 = [
    ("a row for each sequence", "if end == num_tokens:", "if True:"),
    ("rows only of decodes", "if end == num_tokens:", "if end == num_tokens and num_scheduled == 1:"),
    ("rows are positions", "rows.append(len(slots) - 1)", "rows.append(end - 1)"),
    ("the row after the last token", "rows.append(len(slots) - 1)", "rows.append(len(slots))"),
    ("rows are numbers of sequences", "rows.append(len(slots) - 1)", "rows.append(len(rows))"),
    ("without the table", "table[position // block_size]", "(position // block_size)"),
]
