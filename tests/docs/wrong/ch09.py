"""Wrong solutions of the exercises of chapter 9."""

SHARES = "{n: 1 - n / min(size for size in sizes if size >= n) for n in range(1, max(sizes) + 1)}"
SIZE = "min(size for size in sizes if size >= n)"

WRONG_1 = [
    ("not rounded to 128", '"a": (128, 1024)', '"a": (125, 1056)'),
    ("rounded down", '"b": (2048, 1024)', '"b": (1920, 1280)'),
    ("KV heads forgotten", '"b": (2048, 1024)', '"b": (2048, 256)'),
    ("shorter than the shortest split", '"c": (128, 48)', '"c": (6, 936)'),
    ("a case forgotten", ', "c": (128, 48)', ""),
]
WRONG_2 = [
    ("padding over sequences", "1 - n / min", "-1 + 1 / n * min"),
    ("a full graph takes the next one", "if size >= n)", "if size > n or size == max(sizes))"),
    ("the number of rows, not the share", f"1 - n / {SIZE}", f"{SIZE} - n"),
    ("copied", SHARES, "{9: 7 / 16}"),
    ("not the captured sizes, but powers of two", SIZE, "2 ** (n - 1).bit_length()"),
    ("the best batch", "max(shares", "min(shares"),
]
WRONG_3 = [
    ("one program for each context", "range(0, n, split)", "range(0, n, n)"),
    ("one program for all heads", "range(num_kv_heads)", "range(1)"),
    ("all splits are full", "min(split, n - start)", "split"),
    ("the share that is busy", "return 1 - sum", "return sum"),
    (
        "idle over busy",
        "1 - sum(busy_until) / (num_processors * max(busy_until))",
        "max(busy_until) / sum(busy_until) - 1",
    ),
    ("always the first processor", "busy_until.index(min(busy_until))", "0"),
]
