"""Wrong solutions of the exercises of chapter 9."""

SIZE = "min(size for size in sizes if size >= n)"

WRONG_1 = [
    ("not rounded to 128", '"a": (128, 1024)', '"a": (125, 1056)'),
    ("KV heads forgotten", '"b": (2048, 1024)', '"b": (2048, 256)'),
    ("shorter than the shortest split", '"c": (128, 48)', '"c": (6, 936)'),
]
WRONG_2 = [
    ("a full graph takes the next one", "if size >= n)", "if size > n or size == max(sizes))"),
    ("the number of rows, not the share", f"1 - n / {SIZE}", f"{SIZE} - n"),
    ("not the captured sizes, but powers of two", SIZE, "2 ** (n - 1).bit_length()"),
]
WRONG_3 = [
    ("one program for each context", "range(0, n, split)", "range(0, n, n)"),
    ("all splits are full", "min(split, n - start)", "split"),
    ("always the first processor", "busy_until.index(min(busy_until))", "0"),
]
