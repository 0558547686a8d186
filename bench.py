"""How fast it is, beside a peer in the same run, and the experiments of the PagedAttention paper.

python bench.py                          throughput on random requests; ends in a minute or two on a CPU
python bench.py --baseline hf            the same requests and weights in transformers, and the ratio
python bench.py memory                   K/V memory that holds real tokens: preallocation against pages
python bench.py sharing                  blocks saved by parallel sampling and beam search, without a model
python bench.py blocksize                waste, prefixes found and decode speed over block sizes
python bench.py prefix                   prompts that share a beginning, with the prefix cache and without
python bench.py chunked                  what a long prompt does to requests that are running
python bench.py preemption               swapping against recomputing, over block sizes, in both layouts
python bench.py kernel                   paged decode, storing and copying beside the speed of memory
python bench.py sampling                 drawing tokens, beside transformers' filters
python bench.py roofline                 prefill and decode steps beside what this machine could do at best
python bench.py overhead                 what a step costs on the host, over pool sizes and sequences

Each has flags of its own: `python bench.py kernel --help`. Each is a file in `benchmarks/`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "docs" / "experiments"))

import blocksize  # noqa: E402
import chunked  # noqa: E402
import kernel  # noqa: E402
import memory  # noqa: E402
import overhead  # noqa: E402
import preemption  # noqa: E402
import prefix  # noqa: E402
import roofline  # noqa: E402
import sampling  # noqa: E402
import sharing  # noqa: E402
import throughput  # noqa: E402

EXPERIMENTS = {
    "throughput": throughput,
    "memory": memory,
    "sharing": sharing,
    "blocksize": blocksize,
    "prefix": prefix,
    "chunked": chunked,
    "preemption": preemption,
    "kernel": kernel,
    "sampling": sampling,
    "roofline": roofline,
    "overhead": overhead,
}


def main(arguments: list[str]) -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    experiments = parser.add_subparsers(dest="experiment", required=True)
    for name, module in EXPERIMENTS.items():
        about = module.__doc__.splitlines()[0]
        experiment = experiments.add_parser(
            name, help=about, description=module.__doc__, formatter_class=style
        )
        module.add_arguments(experiment)
    if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        arguments = ["throughput", *arguments]
    args = parser.parse_args(arguments)
    EXPERIMENTS[args.experiment].run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
