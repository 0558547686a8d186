"""One decoder for Llama, Qwen2 and Qwen3, which differ only in biases and in a norm of q and k.

The model computes a flat batch, in which the tokens of all sequences stand end to end without
padding. It does not know about sequences, blocks or caches. Only the `attention` function that it
is given does. A model is created without memory, on PyTorch's meta device; `checkpoint.py` gives it
memory and reads its weights.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged.model.model_config import ModelConfig
from nanopaged.parallel import Ranks

# ── small operations ──────────────────────────────────────────────────────────────────────────────


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / √(mean(x²) + ε) · w over the last dimension of x, in float32 (arXiv 1910.07467)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_norm(
    residual: Tensor,
    x: Tensor,
    eps: float,
    weight: Tensor,
    norm: Callable[..., Tensor] = rms_norm,
) -> tuple[Tensor, Tensor]:
    """The sum residual + x, and its norm."""
    residual = residual + x
    return residual, norm(residual, eps, weight)


def norm_rotate(
    qk: Tensor,
    num_q: int,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Normalise the queries and keys of the new tokens, if there are weights, and rotate them.

    Nothing is changed in place, so torch.compile makes one kernel of it.

    Args:
        qk: [num_tokens, heads, head_dim], like the result. The first `num_q` heads are queries.
        weights: the weights of the query norm and of the key norm, each [head_dim].
        cos, sin: the rows of `rotary_tables` at the tokens' positions.
    """
    if weights is not None:
        q_weight, k_weight = weights
        is_query = torch.arange(qk.shape[1], device=qk.device)[:, None] < num_q
        qk = rms_norm(qk, eps) * torch.where(is_query, q_weight, k_weight)
    first, second = qk.chunk(2, dim=-1)
    turned = torch.cat((second * -sin, first * sin), dim=-1)
    return qk * cos + turned


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2 · width] → silu(gate) · up [n, width], where silu(x) = x / (1 + e^-x)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True)
class Operations:
    """The functions that compute the operations of a layer, chosen by model_runner.py.

    Fields:
        norm_rotate: may change its first argument.
        packed_linear: makes of W and b a function that computes x Wᵀ + b faster than `F.linear`.
    """

    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_norm
    norm_rotate: Callable[..., Tensor] = norm_rotate
    silu_mul: Callable[..., Tensor] = silu_mul
    packed_linear: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]] | None = None


PLAIN = Operations()


class OneRank(Ranks):
    """The only rank of a model: it waits for nobody, and its results are complete."""

    step = nullcontext

    def meet(self, device: torch.device) -> None:
        """Do nothing."""

    def all_reduce(self, x: Tensor, op: object = None) -> Tensor:
        """Return x itself, as `gather` does."""
        return x

    gather = all_reduce


ALONE = OneRank(0, size=1, store=None)

# ── layers ────────────────────────────────────────────────────────────────────────────────────────


class Linear(nn.Linear):
    """y = x Wᵀ + b, with W [out_features, in_features].

    Args:
        ranks: the ranks whose results add up to y, because each has some of the columns of W. Only
            rank 0 has b.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(in_features, out_features, bias and ranks.rank == 0, device="meta")
        self.ranks = ranks
        self.packed = None

    def pack(self, operations: Operations) -> None:
        """Replace W by a copy in the order in which the kernel reads it, if there is a kernel."""
        if operations.packed_linear is not None:
            self.packed = operations.packed_linear(self.weight.data, self.bias)
            del self.weight  # frees its memory

    def forward(self, input: Tensor) -> Tensor:
        """input [num_tokens, in_features] → [num_tokens, out_features]."""
        if self.packed is not None:
            out = self.packed(input)
        else:
            out = F.linear(input, self.weight, self.bias)
        return self.ranks.all_reduce(out)


# A CPU computes an MLP for this many tokens at a time. What lies between its two layers then stays
# in the caches, and takes less than 32 MiB. Anything larger, glibc returns to Linux after use.
MLP_BLOCK = 480


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with gate and up in one matrix (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, ranks: Ranks, operations: Operations) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate_up_proj = Linear(hidden, 2 * config.intermediate_size, config.mlp_bias)
        self.silu_mul = operations.silu_mul
        self.down_proj = Linear(config.intermediate_size, hidden, config.mlp_bias, ranks=ranks)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        if x.is_cpu and len(x) > MLP_BLOCK:
            return torch.cat([self.forward(block) for block in x.split(MLP_BLOCK)])
        return self.down_proj(self.silu_mul(self.gate_up_proj(x)))


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """The angle by which position 1 rotates pair i, theta^(-2i / head_dim), for i < head_dim / 2.

    Llama 3 divides the low frequencies by `factor`, keeps the high ones, and blends in between.
    """
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    rope = config.rope_parameters
    frequencies = 1.0 / rope["rope_theta"] ** (dims / config.head_dim)
    if rope["rope_type"] == "default":
        return frequencies
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low = rope["low_freq_factor"]
    keep = ((turns - low) / (rope["high_freq_factor"] - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope["factor"])


def rotary_tables(
    config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The tables of rotary position embedding (Su et al., arXiv 2104.09864), which rotates q and k.

    At position p the pair (x_i, x_{i + half}) is rotated by the angle a_i = p · frequency_i:

        x_i cos a_i - x_{i + half} sin a_i        x_{i + half} cos a_i + x_i sin a_i

    Returns:
        cos [max_positions, 1, head_dim], whose second half repeats the first
        sin [max_positions, 1, head_dim / 2]
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rotary_frequencies(config))[:, None]
    cos = angles.cos().to(device, dtype)
    return torch.cat((cos, cos), dim=-1), angles.sin().to(device, dtype)


# ── the decoder ───────────────────────────────────────────────────────────────────────────────────

AttentionFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention(layer, q, k, v) → out. The shape of q and out is [num_tokens, num_heads, head_dim], the
shape of k and v is [num_tokens, num_kv_heads, head_dim]. The backends of `nanopaged.attention` are
such functions."""


class SelfAttention(nn.Module):
    """q, k, v of the new tokens, attention over the KV cache, and the output projection."""

    def __init__(
        self, config: ModelConfig, layer: int, ranks: Ranks, operations: Operations
    ) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.norm_rotate = operations.norm_rotate
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, q_width + 2 * kv_width, config.qkv_bias)
        self.o_proj = Linear(q_width, config.hidden_size, config.o_bias, ranks=ranks)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, device="meta")
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, device="meta")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        num_q = self.config.num_heads
        num_kv = self.config.num_kv_heads
        qkv = self.qkv_proj(x).view(len(x), -1, self.config.head_dim)
        qk, v = qkv.split([num_q + num_kv, num_kv], dim=1)
        weights = (self.q_norm.weight, self.k_norm.weight) if self.config.qk_norm else None
        qk = self.norm_rotate(qk, num_q, weights, self.config.rms_norm_eps, cos, sin)
        q, k = qk.split([num_q, num_kv], dim=1)  # [num_tokens, num_q or num_kv, head_dim]
        return self.o_proj(attention(self.layer, q, k, v).flatten(1))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)).

    The last sum is left to the next norm, so that one kernel can compute both.
    """

    def __init__(
        self, config: ModelConfig, layer: int, ranks: Ranks, operations: Operations
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.add_norm = operations.add_norm
        # Norms only hold their weights: `add_norm` and `norm_rotate` apply them.
        self.input_layernorm = nn.RMSNorm(config.hidden_size, self.eps, device="meta")
        self.self_attn = SelfAttention(config, layer, ranks=ranks, operations=operations)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, self.eps, device="meta")
        self.mlp = MLP(config, ranks, operations)

    def forward(
        self,
        residual: Tensor,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionFn,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer of residual + x → two tensors whose sum is its output.

        rows: the tokens whose output is needed; None stands for all.
        """
        residual, normed = self.add_norm(residual, x, self.eps, self.input_layernorm.weight)
        x = self.self_attn(normed, cos, sin, attention)
        if rows is not None:
            residual = residual[rows]
            x = x[rows]
        residual, normed = self.add_norm(
            residual, x, self.eps, self.post_attention_layernorm.weight
        )
        return residual, self.mlp(normed)


class Model(nn.Module):
    """Computes hidden states from token ids and positions, and from these `logits`.

    Args:
        ranks: the ranks that share the model.
        operations: the functions that compute the small operations of all layers.

    Attributes:
        cos, sin: the `rotary_tables`, once the model is loaded.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, ranks: Ranks = ALONE, operations: Operations = PLAIN
    ) -> None:
        super().__init__()
        self.config = config
        self.ranks = ranks
        rank_config = config.for_rank_of(ranks.size)
        self.rank_config = rank_config  # with the sizes of this rank's layers
        self.embed_tokens = nn.Embedding(rank_config.vocab_size, config.hidden_size, device="meta")
        self.layers = nn.ModuleList(
            DecoderLayer(rank_config, layer, ranks=ranks, operations=operations)
            for layer in range(config.num_layers)
        )
        self.add_norm = operations.add_norm
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, device="meta")
        self.lm_head = Linear(config.hidden_size, rank_config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        rows: Tensor | None = None,
    ) -> Tensor:
        """input_ids, positions [num_tokens] → hidden states [num_tokens, hidden_size].

        With `rows` [n], only the hidden states of these tokens [n, hidden_size]. The last layer
        stores the K/V of every token, but computes its MLP, most of its work, only for them.
        """
        x = self.embed_tokens(input_ids) if self.ranks.size == 1 else self._embed_rows(input_ids)
        cos = self.cos[positions]
        sin = self.sin[positions]
        residual = torch.zeros_like(x)
        *layers, last_layer = self.layers
        for layer in layers:
            residual, x = layer(residual, x, cos, sin, attention)
        residual, x = last_layer(residual, x, cos, sin, attention, rows)
        return self.add_norm(residual, x, self.norm.eps, self.norm.weight)[1]

    def _embed_rows(self, input_ids: Tensor) -> Tensor:
        """Embed the tokens whose rows this rank has, and add up the results of all ranks."""
        num_rows = self.embed_tokens.num_embeddings
        rows = input_ids - self.ranks.rank * num_rows
        elsewhere = (rows < 0) | (rows >= num_rows)
        x = self.embed_tokens(rows.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
        return self.ranks.all_reduce(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → logits [n, vocab_size], in the dtype of the model.

        Logits on Apple's GPU are copied to the host, because sampling adds up probabilities in
        float64, which that GPU does not have.
        """
        logits = self.ranks.gather(self.lm_head(hidden))[:, : self.config.vocab_size]
        return logits.cpu() if logits.is_mps else logits
