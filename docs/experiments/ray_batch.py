"""Offline batches on a Ray cluster: prompts from files, results to files, with one engine in each actor.

    python docs/experiments/ray_batch.py PROMPTS_FOLDER RESULTS_FOLDER --engines 2

A line of the prompt files is JSON with a "prompt" and, when sampling, a "seed" of its own. A result is a JSON
line with all fields of the prompt's line and the "output". Results are in no particular order. Ray uses the
cluster that RAY_ADDRESS names, or one that runs on this machine, or starts one here. On several machines,
nanopaged must be installed on each, and both folders must be in storage that all of them see (a network file
system, s3://…). What happens on failures: docs/reference/ray.md.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lib.common import at_least, make_parser

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    import pyarrow as pa


class Engine:
    """An engine in an actor: made once, called with one batch of rows after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        from nanopaged import LLM

        self.args = args
        self.llm = LLM(args.model, tensor_parallel_size=args.tensor_parallel_size)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with its outputs. They depend on the rows alone, so a batch can be tried again."""
        from nanopaged import SamplingParams

        rows, limits = batch.to_pylist(), {"max_tokens": self.args.max_tokens}
        seeds = [self.args.seed if row.get("seed") is None else row["seed"] for row in rows]
        params = [SamplingParams(temperature=self.args.temperature, seed=seed, **limits) for seed in seeds]
        outputs = self.llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
        return batch.append_column("output", [[output.outputs[0].text for output in outputs]])


def run(args: argparse.Namespace) -> None:
    import ray

    prompts = ray.data.read_json(args.prompts)  # it also connects to the cluster
    num_gpus = args.tensor_parallel_size if "GPU" in ray.cluster_resources() else None
    results = prompts.map_batches(
        Engine,
        fn_constructor_args=[args],
        compute=ray.data.ActorPoolStrategy(size=args.engines),
        num_gpus=num_gpus,
        num_cpus=None if num_gpus else args.cpus,
        batch_size=args.batch_size,
        batch_format="pyarrow",
    )
    # A second run into the same folder would double the results: it is refused.
    results.write_json(args.results, mode=ray.data.SaveMode.ERROR, force_ascii=False)


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("prompts", metavar="PROMPTS_FOLDER", help="with .jsonl files")
    add("results", metavar="RESULTS_FOLDER", help="must not exist yet")
    add("--model", help="a folder or hub id, instead of the tiny model")
    add("--engines", type=at_least(1), default=2, help="actors, each with an engine")
    add("--tensor-parallel-size", type=at_least(1), default=1, help="GPUs of an engine")
    add("--cpus", type=float, default=0.5, help="CPU cores of an engine, without GPUs")
    add("--batch-size", type=at_least(1), default=1024, help="prompts sent to an engine")
    add("--max-tokens", type=at_least(1), default=64, help="of an output")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of rows without one")
    run(parser.parse_args())


if __name__ == "__main__":
    run_program(main)
