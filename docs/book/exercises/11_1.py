"""Exercise 11.1, more goodput with one option: see docs/book/11-measuring.md."""

changed: list[str] = []  # as on the command line of arrivals.py: "--option", "value"


# ── the check ─────────────────────────────────────────────────────────────────────────────────────

RATE, GOODPUT = 3.5, 2.9
ENGINE = ("max_num_seqs", "budget")  # the options of the engine, as arrivals.py names them


def test_the_goodput_rises() -> None:
    if not changed:
        raise NotImplementedError
    import arrivals

    try:
        options = arrivals.make_arguments([str(word) for word in changed])
    except SystemExit:
        raise AssertionError(f"arrivals.py does not take {' '.join(map(str, changed))}.") from None
    default = vars(arrivals.make_arguments([]))
    names = [name for name, value in vars(options).items() if value != default[name]]
    assert len(names) == 1, f"{len(names)} options differ from those of the table, not one."
    assert names[0] in ENGINE, (
        f"{names[0]} is no option of the engine: the load or the machine would be another."
    )
    lengths = arrivals.draw_lengths(options)
    row = arrivals.summary(lengths, arrivals.simulate(RATE, lengths, options), options)
    assert row["good"] >= GOODPUT, (
        f"With {' '.join(map(str, changed))} {row['good']:.2f} requests a second are good, not {GOODPUT}."
    )
