"""Wrong solutions of the exercises of chapter 1."""

UNITS = "-(-(num_input + num_output) // unit)"
TIME = "2 * WEIGHTS / OPERATIONS"

WRONG_1 = [
    ("one block too many for a full one", "-(-length // size)", "length // size + 1"),
    ("all lengths in one row", "sum(-(-length // size) for length in lengths)", "-(-sum(lengths) // size)"),
    ("the bound is W's", "len(lengths) * (size - 1)", "blocks * size - sum(lengths)"),
]
WRONG_2 = [
    ("a unit too many for a multiple", UNITS, "((num_input + num_output) // unit + 1)"),
    ("the prompt is rounded apart", UNITS, "(-(-num_input // unit) - (-num_output // unit))"),
    ("reservation rises", '"internal", "external", "reserved"', '"reserved", "external", "internal"'),
]
WRONG_3 = [
    ("the two speeds are confused", "/ OPERATIONS * BANDWIDTH", "/ BANDWIDTH * OPERATIONS"),
    ("the number from the page", "2 * WEIGHTS / OPERATIONS * BANDWIDTH / bytes_per_token", "556"),
    ("reads the weights for each request", TIME, f"({TIME} - 2 * WEIGHTS / BANDWIDTH)"),
]
