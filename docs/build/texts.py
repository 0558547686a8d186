"""What the tiny model says with the package of each folder, as a list in JSON: see docs/build/rebuild.py.

One process for all of them, because PyTorch takes seconds to load.
"""

from __future__ import annotations

import json
import sys

import torch

PROMPTS = ["ROMEO:\n", "JULIET:\n", "ROMEO:\n"]


def text_of(folder: str) -> str:
    """The first of three texts, or the error that stops the engine."""
    for name in [name for name in sys.modules if name.split(".")[0] == "nanopaged"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        from nanopaged import LLM, SamplingParams

        llm = LLM(dtype="float32", block_size=4, num_blocks=40)
        params = SamplingParams(temperature=0, max_tokens=12)
        return llm.generate(PROMPTS, params, use_tqdm=False)[0].outputs[0].text.strip()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.path.remove(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is so small that a second thread only waits
    print(json.dumps([text_of(folder) for folder in sys.argv[1:]]))
