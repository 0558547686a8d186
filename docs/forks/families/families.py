"""Two more model families: Mistral v0.3, and Qwen3-MoE with its mixture of experts.

Mistral v0.3 is computed as Llama is: it is a row of the engine's table of families.

A step computes each expert once, for all tokens that chose it. A pair is one choice of one token. If each
token chooses 2 of 3 experts, pair i is of token i // 2:

    tokens          a    b    c
    chosen         2 0  0 1  2 1        of the pairs 0 1 2 3 4 5
    by expert      0: pairs 1 2         expert 0 computes the tokens a b
                   1: pairs 3 5         expert 1               b c
                   2: pairs 0 4         expert 2               a c
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

import nanopaged
from nanopaged.attention import make_backend
from nanopaged.engine import LLMEngine
from nanopaged.kv_cache import KVCache
from nanopaged.model import checkpoint
from nanopaged.model.decoder import ALONE, PLAIN, Linear, Model, Operations
from nanopaged.model.model_config import FAMILIES, ModelConfig, read_json
from nanopaged.model_runner import ModelRunner
from nanopaged.parallel import Ranks

# transformers computes Mistral without biases, also if its config.json has them.
FAMILIES.update({"mistral": {"qkv_bias": False, "o_bias": False}, "qwen3_moe": {"qk_norm": True}})


@dataclass(frozen=True)
class ExpertsConfig(ModelConfig):
    """A `ModelConfig` with the sizes of a mixture of experts."""

    sparse_layers: tuple[int, ...]  # those with experts; the others have one MLP of `intermediate_size`
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of each expert
    norm_topk_prob: bool  # the probabilities of a token's experts are divided by their sum

    def for_rank_of(self, size: int) -> ModelConfig:
        """The layers of one of `size` ranks: all experts, and of each one a share of its columns.

        Raises ValueError if the columns of an expert cannot be divided.
        """
        columns = self.moe_intermediate_size
        if columns % size != 0:
            raise ValueError(
                f"tensor_parallel_size is {size}, but must divide a moe_intermediate_size of {columns}"
            )
        return super(ExpertsConfig, replace(self, moe_intermediate_size=columns // size)).for_rank_of(size)


def with_experts(config: ModelConfig, folder: Path) -> ModelConfig:
    """The config with what `folder`/config.json says of experts; of a model without them, as it is.

    6 layers, decoder_sparse_step 2, mlp_only_layers [3]: every second layer is 1, 3 and 5; sparse are 1 and 5
    """
    raw = read_json(folder / "config.json")
    if raw.get("model_type") != "qwen3_moe":
        return config
    hf: Any = AutoConfig.for_model(**raw)  # fills in defaults, and knows older names; it checks the types
    step = hf.decoder_sparse_step
    layers = tuple(i for i in range(step - 1, config.num_layers, step) if i not in hf.mlp_only_layers)
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return ExpertsConfig(**vars(config), sparse_layers=layers, **{name: getattr(hf, name) for name in names})


class Expert(nn.Module):
    """down(silu(gate(x)) · up(x)).

    Gate and up are two matrices, as in the checkpoint: `_weight_targets` can halve a common one only at
    `intermediate_size`, which is the size of a dense MLP.
    """

    def __init__(self, hidden_size: int, columns: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, columns, bias=False)
        self.up_proj = Linear(hidden_size, columns, bias=False)
        self.down_proj = Linear(columns, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape; with several ranks, this rank's part of the sum."""
        return self.down_proj(F.silu(self.gate_proj(x)).mul_(self.up_proj(x)))


class MixtureOfExperts(nn.Module):
    """A router, named `gate` as in checkpoints, and its experts. The router is whole on every rank."""

    def __init__(self, config: ExpertsConfig, ranks: Ranks) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.ranks, sizes = ranks, (config.hidden_size, config.moe_intermediate_size)
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(*sizes) for _ in range(config.num_experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [num_tokens, hidden_size] → weights (of the dtype of x) and experts, each [num_tokens, top_k].

        As in transformers the probabilities are float32, and are rounded after they have been divided.
        """
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)  # [num_tokens, num_experts]
        weights, chosen = probabilities.topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the weighted sums of the tokens' experts, of the same shape.

        A token's results are added in the order of the experts, in every batch the same. An expert has a
        token at most once, so `index_add_` never adds twice to a row, in an order that a GPU leaves open.
        """
        weights, chosen = (each.flatten() for each in self.route(x))  # of the pairs: [num_tokens · top_k]
        # The sizes below depend on the data. So the host waits for a GPU here, once in each layer.
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x)
        for expert, pairs in zip(self.experts, chosen.argsort(stable=True).split(counts), strict=True):
            if len(pairs) > 0:
                tokens = pairs // self.top_k
                out.index_add_(0, tokens, expert(x[tokens]) * weights[pairs, None])
        return self.ranks.all_reduce(out)


class SparseModel(Model):
    """A `Model` whose sparse layers have experts. With a config without experts it is a `Model`."""

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE, operations: Operations = PLAIN) -> None:
        super().__init__(config, ranks, operations)
        if isinstance(self.rank_config, ExpertsConfig):
            for i in self.rank_config.sparse_layers:  # the MLP that is replaced has no memory yet
                self.layers[i].mlp = MixtureOfExperts(self.rank_config, ranks)


checkpoint.Model = SparseModel  # the class that `load_model` makes


class FamiliesRunner(ModelRunner):
    def make_model(self, model_config: ModelConfig, folder: Path, **options: Any) -> Model:
        """As `load_model`, of a model that may have experts."""
        model_config = with_experts(model_config, folder)
        return checkpoint.load_model(model_config=model_config, folder=folder, **options)

    def make_attention(self, backend: str, cache: KVCache, scale: float) -> Any:
        """As before. With experts, no step is recorded as a CUDA graph, because its sizes are fixed."""
        attention = make_backend(backend, cache, scale)
        attention.supports_cuda_graphs &= not isinstance(self.model.config, ExpertsConfig)
        return attention


class FamiliesEngine(LLMEngine):
    make_runner = FamiliesRunner


class LLM(nanopaged.LLM):
    engine_class = FamiliesEngine
