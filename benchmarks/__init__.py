"""The experiments of `bench.py`, one a file: `add_arguments(parser)` and `run(args)`."""
