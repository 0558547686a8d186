"""Train the tiny model in the box: a 2.9M-parameter Qwen3 that speaks in the shape of Shakespeare.

    OMP_WAIT_POLICY=PASSIVE python docs/experiments/train_tiny.py \\
        --train plays.txt --val held_out.txt --out nanopaged/tiny --minutes 25

Both files are plain text: a line `NAME:`, the lines of the speech, an empty line, the next speech.
What comes out is an ordinary Hugging Face folder (weights in bfloat16, a tokenizer of 1024 tokens,
a chat template) that `transformers` loads unchanged.

It is made for a CPU: `--minutes` is the budget, and the learning rate follows the clock, not the
step count. So a faster machine trains a better model, and the same seed does not give the same
weights twice. The environment variable is for a machine with other work on it: without it, threads
that wait for a preempted one spin instead of sleeping.

What is trained is transformers' own Qwen3, so there is no second implementation to keep in step.
Choices that are not obvious:

- Muon for the hidden matrices, AdamW for the embedding and the norms: in trials of 90 CPU-seconds
  that gave 4.1 nats per token against 5.0 for AdamW alone (tried with one learning rate only).
- The budget is several passes over a few megabytes of text with a model large enough to learn them
  by heart: hence dropout (in training only; Qwen3 has none), a weight decay ten times the usual,
  and the checkpoint kept is the one that validates best.
- Three steps in four see short rows, the fourth long ones, because a short row is cheaper per
  token. With 256 tokens plain matrix products (`eager`) beat the CPU's flash attention (`sdpa`);
  with 1024 it is the other way round.
- One row in four is a chat: consecutive speeches become the turns of a user and an assistant. That
  is what teaches the model to end an answer with <|im_end|>; the plain rows never end.
"""

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from nanopaged.terminal import run_program

END_OF_TEXT, IM_START, IM_END = SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 1024
# How Qwen splits text before byte-pair merging: contractions, words, single digits, punctuation,
# runs of newlines and of spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# (rows, tokens in a row): 4096 tokens a step, either way. One step in LONG_EVERY sees long rows.
SHORT_ROWS, LONG_ROWS = (16, 256), (4, 1024)
LONG_EVERY = 4
CHAT_SHARE = 0.25
DROPOUT = 0.1
WEIGHT_DECAY = 1.0  # of the hidden matrices
PEAK_LR = 3e-3
WARMUP = 0.02  # of the time
NUM_EVALS = 40


class Stream(NamedTuple):
    """One long run of tokens, and where in it a row may start."""

    tokens: Tensor
    starts: Tensor


class HeldOut(NamedTuple):
    """The validation text, as tokens."""

    tokens: Tensor
    num_chars: int

    def describe(self, loss: float) -> str:
        bits = loss * (len(self.tokens) - 1) / self.num_chars / math.log(2)
        return f"val {loss:.4f} nats/token = {bits:.4f} bits/char"


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCAB_SIZE tokens; the specials are ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
    )


def encode(tokenizer: PreTrainedTokenizerFast, pieces: list[str], starts_every: int) -> Stream:
    """Pieces end to end. A row may start at every `starts_every`-th one, if a long row fits."""
    encoded = tokenizer(pieces)["input_ids"]
    lengths = torch.tensor([len(ids) for ids in encoded])
    starts = (lengths.cumsum(0) - lengths)[::starts_every]
    tokens = torch.tensor([token for ids in encoded for token in ids])
    return Stream(tokens, starts[starts + LONG_ROWS[1] < len(tokens)])


def chat_turns(speeches: list[str]) -> list[str]:
    """user, assistant, user, …: a user's turn loses its `NAME:` line, an assistant's keeps it."""
    turns = []
    for i, speech in enumerate(speeches):
        role, content = ("assistant", speech) if i % 2 else ("user", speech.split("\n", 1)[-1])
        turns.append(f"{IM_START}{role}\n{content}{IM_END}\n")
    return turns


def pack(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[Stream, list[Stream]]:
    """The plain stream, and two of chats, so that each speech is a question and an answer once.

    speeches A B C D …    chats: user A, assistant B, user C, …  and  user B, assistant C, user D, …
    """
    speeches = text.strip().split("\n\n")
    plain = encode(tokenizer, [speech + "\n\n" for speech in speeches], starts_every=1)
    chats = [encode(tokenizer, chat_turns(speeches[shift:]), starts_every=2) for shift in (0, 1)]
    return plain, chats


def draw_rows(plain: Stream, chats: list[Stream], num_rows: int, length: int) -> Tensor:
    """`num_rows` rows of `length + 1` tokens, each from the start of a random speech."""
    rows = []
    for is_chat in torch.rand(num_rows) < CHAT_SHARE:
        stream = chats[int(torch.randint(len(chats), ()))] if is_chat else plain
        start = int(stream.starts[torch.randint(len(stream.starts), ())])
        rows.append(stream.tokens[start : start + length + 1])
    return torch.stack(rows)


def build_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=640,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=SPECIALS.index(IM_END),
        pad_token_id=SPECIALS.index(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def prepare_for_training(model: Qwen3ForCausalLM) -> None:
    """Small residual branches, dropout on the embedding and each branch, compiled layers."""

    def drop(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.dropout(output, DROPOUT, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    layers: Any = model.model.layers
    for layer in layers:
        for branch_out in (layer.self_attn.o_proj, layer.mlp.down_proj):
            branch_out.weight.data /= math.sqrt(2 * len(layers))
            branch_out.register_forward_hook(drop)
        layer.compile(dynamic=False)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    in_layers = set(model.model.layers.parameters())
    matrices = [p for p in model.parameters() if p in in_layers and p.ndim == 2]
    others = [p for p in model.parameters() if p not in in_layers or p.ndim != 2]
    return [
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(progress: float) -> float:
    """A linear warm-up, then a cosine to zero; `progress` is the share of the time that is gone."""
    if progress < WARMUP:
        return PEAK_LR * progress / WARMUP
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


def train_step(
    model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], rows: Tensor, lr: float
) -> float:
    """One step with bfloat16 products and float32 weights. Returns the loss in nats per token."""
    is_long = rows.shape[1] > SHORT_ROWS[1] + 1
    model.set_attn_implementation("sdpa" if is_long else "eager")
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model: Qwen3ForCausalLM, tokens: Tensor, window: int = 1024) -> float:
    """Mean loss in nats per token over windows end to end: all tokens but the first count once."""
    model.eval()
    model.set_attn_implementation("sdpa")
    total = 0.0
    with torch.compiler.set_stance("force_eager"):
        for start in range(0, len(tokens) - 1, window):
            row = tokens[start : start + window + 1]
            logits = model(row[None, :-1], use_cache=False).logits[0].float()
            total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    model.train()
    return total / (len(tokens) - 1)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The two files by hand: `save_pretrained` names a class that only transformers 5 knows."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": tokenizer.model_max_length,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder file by file, each complete before it takes the place of an older one."""
    out.mkdir(parents=True, exist_ok=True)
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    im_end, end_of_text = SPECIALS.index(IM_END), SPECIALS.index(END_OF_TEXT)
    ends = [im_end, end_of_text]
    copy.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=end_of_text)
    with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as folder:
        copy.save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder))
        for file in Path(folder).iterdir():
            file.chmod(0o644)
            os.replace(file, out / file.name)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    held_out: HeldOut,
    out: Path,
    minutes: float,
) -> None:
    """Train for `minutes`; `out` gets the model whenever it validates better than before."""
    plain, chats = pack(tokenizer, text)
    num_params = sum(p.numel() for p in model.parameters())
    print(f"{num_params:,} parameters; {len(plain.tokens):,} tokens to train on", flush=True)

    prepare_for_training(model)
    optimizers = build_optimizers(model)
    model.train()
    began, step, best, losses = time.time(), 0, math.inf, []
    progress, next_eval = 0.0, 1 / NUM_EVALS
    while progress < 1:
        rows = draw_rows(plain, chats, *(SHORT_ROWS if step % LONG_EVERY else LONG_ROWS))
        losses.append(train_step(model, optimizers, rows, learning_rate(progress)))
        step += 1
        progress = (time.time() - began) / (60 * minutes)
        if progress < next_eval:
            continue

        next_eval = min(1.0, progress + 1 / NUM_EVALS)
        val = evaluate(model, held_out.tokens)
        if val < best:
            best = val
            save(model, tokenizer, out)
        print(
            f"{time.time() - began:5.0f} s (cpu {time.process_time():5.0f} s)  step {step:6}"
            f"  {step * math.prod(SHORT_ROWS) / 1e6:6.2f}M tokens"
            f"  train {sum(losses) / len(losses):.4f}  {held_out.describe(val)}"
            f"{'  saved' if val == best else ''}",
            flush=True,
        )
        losses = []


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model that ships with nanopaged.")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--val", type=Path, required=True, help="text to choose the checkpoint by")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=25, help="how long to train")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    text, val_text = args.train.read_text(encoding="utf-8"), args.val.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    val_tokens = torch.tensor(tokenizer(val_text, verbose=False)["input_ids"])
    held_out = HeldOut(val_tokens, len(val_text))
    train(build_model(), tokenizer, text, held_out, args.out, args.minutes)

    saved = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    print(f"as saved: {held_out.describe(evaluate(saved, held_out.tokens))}")


if __name__ == "__main__":
    run_program(main)
