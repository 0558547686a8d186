"""Paged attention from nothing, in one file: PyTorch, a model, and the idea.

    python docs/one_file.py

An LLM generates a text token by token. Attention lets each token look at all tokens before it, through two
vectors that every token has in every layer, its key and its value (K/V). They are kept, because computing
them again for each new token would take longer and longer. But how long will a text be? If each request got
one contiguous range of memory, for the longest text it may have, most of that range would stay empty. Paged
attention gives it memory in small blocks, when they are needed, wherever they are; a table says where.

Here is all of that, top to bottom: 1. the pool of blocks, 2. the requests, 3. the scheduler, 4. the model,
which reads K/V through the tables, 5. the loop. docs/book/00-map.md says where the engine has each part.
"""

import json
import math
import signal
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C and a reader that goes (`| head`) end the program without a traceback
    for name in {"SIGINT", "SIGPIPE"} & set(dir(signal)):  # Windows has no SIGPIPE
        signal.signal(getattr(signal, name), signal.SIG_DFL)

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

BLOCK_SIZE = 16  # tokens in a block
BUDGET = 256  # tokens computed in one step: of prompts, in pieces if they are longer, and of running texts
TINY = Path(__file__).parents[1] / "nanopaged" / "tiny"  # a small Qwen3, trained on Shakespeare


# ── 1. The pool of blocks (in the engine: block_manager.py) ───────────────────────────────────────


class Pool:
    """Which blocks are free, and how many requests use each of the others.

    A full block never changes, so requests whose texts begin alike can share it. It is found by its key: all
    tokens up to its end, because K/V depends on all tokens before it. When no request uses it any more, it
    stays findable until its memory is needed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.num_users = [0] * num_blocks
        self.cached: OrderedDict[int, None] = OrderedDict()  # full, findable, unused; the oldest first
        self.found: dict[tuple[int, ...], int] = {}  # key → block
        self.key_of: dict[int, tuple[int, ...]] = {}  # block → key

    def num_free(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A block for one request to write. If none is empty, the oldest cached one is evicted."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            del self.found[self.key_of.pop(block)]
        self.num_users[block] = 1
        return block

    def share(self, block: int) -> None:
        self.cached.pop(block, None)
        self.num_users[block] += 1

    def release(self, block: int) -> None:
        self.num_users[block] -= 1
        if self.num_users[block] == 0 and block in self.key_of:
            self.cached[block] = None
        elif self.num_users[block] == 0:
            self.free.append(block)

    def prefix(self, tokens: list[int]) -> list[int]:
        """The findable blocks that these tokens begin with. The last token is always computed, because only
        a computed token has logits, from which the next one is sampled."""
        blocks = []
        for end in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE):
            if (block := self.found.get(tuple(tokens[:end]))) is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, tokens: list[int], block: int) -> None:
        """Make the block that ends with these tokens findable, unless another one has the same tokens."""
        if self.found.setdefault(tuple(tokens), block) == block:
            self.key_of[block] = tuple(tokens)


# ── 2. The requests (sequence.py) ─────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Request:
    """A prompt and what was generated. The K/V of `tokens[:num_computed]` is in the blocks of the table:
    token 37 is in table[37 // 16] = table[2], at offset 37 % 16 = 5."""

    tokens: list[int]
    num_prompt: int
    max_length: int
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0  # to be computed in this step

    def slots(self, first: int, end: int) -> list[int]:
        """Where the K/V of tokens first … end - 1 is, counted through the whole memory."""
        return [self.table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, end)]


# ── 3. The scheduler (scheduler.py) ───────────────────────────────────────────────────────────────


class Scheduler:
    """Chooses the requests of each step, and how many tokens of each are computed: all that it knows and has
    not computed, as far as the budget goes. That one rule serves new prompts, later pieces of them, prompts
    whose beginning was found, and running texts, which have one token left."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = Pool(num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preempted = 0

    def schedule(self) -> list[Request]:
        batch, budget, i = [], BUDGET, 0
        while i < len(self.running) and budget > 0:  # first those that run, …
            request = self.running[i]
            if len(request.tokens) > len(request.table) * BLOCK_SIZE:  # its newest token needs a block
                if self.pool.num_free() == 0:
                    self.preempt(self.running.pop())  # the latest request gives way, maybe this one itself
                    continue
                request.table.append(self.pool.take())
            budget -= self.add(request, batch, budget)
            i += 1
        while self.waiting and budget > 0:  # … then those that wait, as long as there are blocks for them
            request = self.waiting[0]
            prefix = self.pool.prefix(request.tokens)
            num_new = math.ceil(len(request.tokens) / BLOCK_SIZE) - len(prefix)
            # num_free() counts the cached ones, but sharing uses them up.
            num_cached = sum(block in self.pool.cached for block in prefix)
            if num_new + num_cached > self.pool.num_free():
                break
            for block in prefix:
                self.pool.share(block)
            request.table = prefix + [self.pool.take() for _ in range(num_new)]
            request.num_computed = len(prefix) * BLOCK_SIZE
            self.running.append(self.waiting.popleft())
            budget -= self.add(request, batch, budget)
        return batch

    def add(self, request: Request, batch: list[Request], budget: int) -> int:
        n = request.num_scheduled = min(len(request.tokens) - request.num_computed, budget)
        batch.append(request)
        # Full blocks can be found at once, even by a request of this very step, because in every layer the
        # model stores the K/V of the whole batch before any token looks at it.
        num_full = request.num_computed // BLOCK_SIZE  # blocks that were full, and so findable, before
        for end in range((num_full + 1) * BLOCK_SIZE, request.num_computed + n + 1, BLOCK_SIZE):
            self.pool.publish(request.tokens[:end], request.table[end // BLOCK_SIZE - 1])
        return n

    def preempt(self, request: Request) -> None:
        """Its blocks go to others. It keeps its tokens, and their K/V is computed again later."""
        self.free(request)
        self.waiting.appendleft(request)
        self.num_preempted += 1

    def free(self, request: Request) -> None:
        for block in reversed(request.table):  # so that the end of a text is evicted before its beginning
            self.pool.release(block)
        request.table, request.num_computed = [], 0


# ── 4. The model (model/decoder.py, kv_cache.py, attention/) ──────────────────────────────────────


class Model:
    """A Qwen3. `kv` is the memory that the blocks divide: [layer, K or V, slot, head, head_dim]."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.config = c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
        self.eps, self.heads = c["rms_norm_eps"], c["num_attention_heads"]
        self.kv_heads = c["num_key_value_heads"]
        num_slots, head_dim = num_blocks * BLOCK_SIZE, c["head_dim"]
        self.kv = torch.zeros(c["num_hidden_layers"], 2, num_slots, self.kv_heads, head_dim)
        self.frequencies = c["rope_parameters"]["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[name + ".weight"])

    def rotate(self, x: torch.Tensor, positions: list[int]) -> torch.Tensor:
        """Tell q and k [tokens, heads, head_dim] their position: turn each pair of numbers by an angle."""
        angles = torch.outer(torch.tensor(positions), self.frequencies)[:, None]  # [tokens, 1, head_dim / 2]
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(self, q: torch.Tensor, layer: int, request: Request) -> torch.Tensor:
        """Paged attention: the K/V of one request, gathered through its table, for its new tokens q."""
        start, end = request.num_computed, request.num_computed + request.num_scheduled
        k, v = self.kv[layer][:, request.slots(0, end)].transpose(1, 2)  # each [kv_heads, end, head_dim]
        earlier = torch.arange(end) <= torch.arange(start, end)[:, None]  # no token looks at a later one
        q = q.transpose(0, 1)
        return F.scaled_dot_product_attention(q, k, v, earlier, enable_gqa=True).transpose(0, 1)

    @torch.inference_mode()
    def __call__(self, batch: list[Request]) -> torch.Tensor:
        """The scores of the next token [requests, vocabulary], after the last new token of each request."""
        lengths = [request.num_scheduled for request in batch]
        ids, positions, slots = [], [], []  # of all new tokens of the batch, end to end
        for request in batch:
            first, end = request.num_computed, request.num_computed + request.num_scheduled
            ids += request.tokens[first:end]
            positions += range(first, end)
            slots += request.slots(first, end)
        x = self.weights["model.embed_tokens.weight"][ids]  # [tokens, hidden_size]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            y = self.norm(x, name + "input_layernorm")
            q, k, v = (
                self.linear(y, f"{name}self_attn.{part}_proj").view(len(x), heads, -1)
                for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            q = self.rotate(self.norm(q, name + "self_attn.q_norm"), positions)
            k = self.rotate(self.norm(k, name + "self_attn.k_norm"), positions)
            # First the K/V of all tokens is stored, [2, tokens, kv_heads, head_dim] …
            self.kv[layer, :, slots] = torch.stack((k, v))
            parts = zip(q.split(lengths), batch, strict=True)  # … then each request reads its own
            outs = [self.attend(q, layer, request) for q, request in parts]
            x = x + self.linear(torch.cat(outs).flatten(1), name + "self_attn.o_proj")
            y = self.norm(x, name + "post_attention_layernorm")
            y = F.silu(self.linear(y, name + "mlp.gate_proj")) * self.linear(y, name + "mlp.up_proj")
            x = x + self.linear(y, name + "mlp.down_proj")
        last = torch.tensor(lengths).cumsum(0) - 1
        return self.norm(x[last], "model.norm") @ self.weights["model.embed_tokens.weight"].T


# ── 5. The loop (engine.py, llm.py) ───────────────────────────────────────────────────────────────


def generate(
    prompts: list, max_tokens: int = 16, num_blocks: int = 64, folder: Path = TINY, show: bool = False
) -> list[list[int]]:
    """The most likely tokens after each prompt (a text, or token ids), until one ends the text.

    Raises:
        ValueError: a prompt is empty or too long, or the pool is too small for one request.
    """
    model, scheduler, requests = Model(folder, num_blocks), Scheduler(num_blocks), []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    longest = model.config["max_position_embeddings"]
    end_ids = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    for prompt in prompts:
        tokens = tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        max_length = min(len(tokens) + max_tokens, longest)
        num_needed = -(-(max_length - 1) // BLOCK_SIZE)  # the K/V of the last token is never read
        if not 0 < len(tokens) < longest:
            raise ValueError(f"the prompt has {len(tokens)} tokens, but must have 1 to {longest - 1}")
        if num_needed > num_blocks:
            raise ValueError(f"{max_length} tokens need {num_needed} blocks, but num_blocks is {num_blocks}")
        requests.append(Request(tokens, len(tokens), max_length))
    scheduler.waiting.extend(requests)
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        next_tokens = model(batch).argmax(-1).tolist()
        for request, token in zip(batch, next_tokens, strict=True):
            request.num_computed += request.num_scheduled
            if request.num_computed < len(request.tokens):
                continue  # only a chunk of its prompt was computed: there is no next token yet
            request.tokens.append(token)
            if token in end_ids or len(request.tokens) == request.max_length:
                scheduler.running.remove(request)
                scheduler.free(request)
        if show:
            pool, num_tokens = scheduler.pool, sum(request.num_scheduled for request in batch)
            num_used, num_waiting = num_blocks - pool.num_free(), len(scheduler.waiting)
            print(f"{num_tokens:4} tokens of {len(batch)} requests, {num_waiting} waiting:", end=" ")
            print(
                f"{num_used:2} blocks used, {len(pool.cached):2} cached, {scheduler.num_preempted} preempted"
            )
    return [request.tokens[request.num_prompt :] for request in requests]


def main() -> None:
    names = ["ROMEO", "JULIET", "HAMLET", "KING HENRY", "MACBETH", "OTHELLO"]
    scene = "ACT I\nSCENE I. A public place. Enter Sampson and Gregory, armed with swords.\n"
    outputs = generate([f"{scene}{name}:\n" for name in names], max_tokens=24, num_blocks=16, show=True)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for name, tokens in zip(names, outputs, strict=True):
        print(f"\n{name}:\n{tokenizer.decode(tokens)}")


if __name__ == "__main__":
    main()
