"""Wrong solutions of the exercises of chapter 9."""

SHARES = "{n: 1 - n / min(size for size in sizes if size >= n) for n in range(1, max(sizes) + 1)}"
SIZE = "min(size for size in sizes if size >= n)"

WRONG_1 = [
    ("no power of two", '"a": (32, 512)', '"a": (17, 272)'),
    ("rounded down to a power of two", '"a": (32, 512)', '"a": (16, 256)'),
    ("a program for each SM", '"b": (2, 320)', '"b": (1, 160)'),
    ("splits of fewer than 256 keys", '"c": (2, 16)', '"c": (64, 512)'),
    ("KV heads forgotten", '"c": (2, 16)', '"c": (2, 4)'),
    ("a case forgotten", ', "c": (2, 16)', ""),
]
WRONG_2 = [
    ("padding over sequences", "1 - n / min", "-1 + 1 / n * min"),
    ("a full graph takes the next one", "if size >= n)", "if size > n or size == max(sizes))"),
    ("the number of rows, not the share", f"1 - n / {SIZE}", f"{SIZE} - n"),
    ("copied", SHARES, "{9: 7 / 16}"),
    ("not the captured sizes, but powers of two", SIZE, "2 ** (n - 1).bit_length()"),
    ("the best batch", "max(shares", "min(shares"),
    ("without the largest batch", "range(1, max(sizes) + 1)", "range(2, max(sizes))"),
]
WRONG_3 = [
    ("one split", "-(-tiles // tiles_per_split), min(num_keys, tiles_per_split * tile)", "1, num_keys"),
    ("all splits", "-(-tiles // tiles_per_split), min", "num_splits, min"),
    ("all splits, as far as there are tiles", "-(-tiles // tiles_per_split), ", "min(tiles, num_splits), "),
    ("splits that are no whole tiles", "tiles = -(-num_keys // tile)", "tile, tiles = 1, num_keys"),
    ("rounds the tiles of a split down", "-(-tiles // num_splits)", "max(1, tiles // num_splits)"),
    ("rounds the tiles down", "-(-num_keys // tile)", "max(1, num_keys // tile)"),
    ("more keys than there are", "min(num_keys, tiles_per_split * tile)", "tiles_per_split * tile"),
    ("64 splits always", "-(-tiles // num_splits)", "-(-tiles // 64)"),
]
