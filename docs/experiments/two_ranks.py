"""One rank and two ranks of the tiny model on a CPU: what each holds, their tokens, and the tables sent.

    python docs/experiments/two_ranks.py

The prompts have a common beginning, so their tables share a block.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from lib.common import make_parser

from nanopaged.terminal import run_program

if TYPE_CHECKING:
    from nanopaged import LLM

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [3, 5, 7, 9, 17, 19]]  # 7 and 6 tokens, of which 4 are the same
MAX_TOKENS = 6


def main() -> None:
    make_parser(__doc__).parse_args()

    from nanopaged import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    columns, tokens, messages = [], [], []
    for size in (1, 2):
        llm = LLM(tensor_parallel_size=size, dtype="float32", block_size=4, num_blocks=16)
        num_all_reduces = watch(llm, messages)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        columns.append(held(llm) | {"all-reduces of a step": num_all_reduces[0] // MAX_TOKENS})
        del llm  # the worker ends
    print(f"{'each rank has':24}{'1 rank':>8}{'2 ranks':>9}")
    for name, value in columns[0].items():
        print(f"{name:24}{value:8,}{columns[1][name]:9,}")
    print("tokens of both:", "the same" if tokens[0] == tokens[1] else f"different: {tokens}")
    print("\nblock tables in the messages to rank 1:")
    for number, message in enumerate(messages, start=1):
        print(f"step {number}: {message.metadata.block_tables}")


def watch(llm: LLM, messages: list[Any]) -> list[int]:
    """Keep the messages of the engine's steps as a worker reads them, and count its all-reduces."""
    ranks = llm.engine.runner.ranks
    num_all_reduces = [0]
    if ranks.size == 1:
        return num_all_reduces
    step, all_reduce = ranks.step, ranks.all_reduce

    def kept(message: Any) -> Any:
        messages.append(pickle.loads(pickle.dumps(message)))
        return step(message)

    def counted(x: Any) -> Any:
        num_all_reduces[0] += 1
        return all_reduce(x)

    ranks.step, ranks.all_reduce = kept, counted
    return num_all_reduces


def held(llm: LLM) -> dict[str, int]:
    """What rank 0 has of the model and of the KV cache."""
    runner = llm.engine.runner
    share, cache = runner.model.rank_config, runner.kv_cache
    return {
        "query heads": share.num_heads,
        "KV heads": share.num_kv_heads,
        "columns of the MLP": share.intermediate_size,
        "rows of the vocabulary": runner.model.embed_tokens.num_embeddings,
        "blocks": runner.num_blocks,
        "bytes of a block": cache.data[0].nbytes,
    }


if __name__ == "__main__":
    run_program(main)
