"""Wrong solutions of the exercises of chapter 1."""

TIME = "2 * WEIGHTS / OPERATIONS"

WRONG_1 = [
    ("one block too many for a full one", "-(-length // size)", "length // size + 1"),
    ("rounds down", "-(-length // size)", "length // size"),
    ("all lengths in one row", "sum(-(-length // size) for length in lengths)", "-(-sum(lengths) // size)"),
    ("the bound is W's", "len(lengths) * (size - 1)", "blocks * size - sum(lengths)"),
    ("a bound for each slot", "len(lengths) * (size - 1)", "len(lengths) * size"),
]
WRONG_2 = [
    ("one operation a weight", "2 * WEIGHTS", "WEIGHTS"),
    ("the two speeds are confused", "/ OPERATIONS * BANDWIDTH", "/ BANDWIDTH * OPERATIONS"),
    ("a token has one size", "/ bytes_per_token", "/ 131_072"),
    ("grows with the bytes", "/ bytes_per_token", "* bytes_per_token"),
    ("the number from the page", "2 * WEIGHTS / OPERATIONS * BANDWIDTH / bytes_per_token", "556"),
    ("reads the weights for each request", TIME, f"({TIME} - 2 * WEIGHTS / BANDWIDTH)"),
]
