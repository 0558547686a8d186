"""Apple's GPU, on a Mac; elsewhere, whether PyTorch has a kernel for it of each operator that is used there.

What is not known without a Mac is which dtypes and shapes each Metal kernel takes, and how exact it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from conftest import Oracle, tokens, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.model.decoder import Model
from nanopaged.model_runner import ModelRunner

REAL = torch.backends.mps.is_available()
on_a_mac = pytest.mark.skipif(not REAL, reason="there is no Apple GPU")
WIDE = (torch.float64, torch.complex128)  # docs.pytorch.org/docs/stable/notes/mps.html
DEVICES = ["mps", "cpu"]


def engine(oracle: Oracle, device: str, **options: object) -> LLM:
    defaults = {"block_size": 4, "num_blocks": 40, "attention_backend": "torch", "preemption": "swap"}
    return LLM(oracle.folder, device=device, **defaults | options)


def run_in_a_small_pool(llm: LLM) -> list[list[int]]:
    """Too few blocks for three samples or beams each, prompts in chunks, prefixes, blocks copied on write."""
    prompts = [tokens(5, 9), tokens(5, 9) + [1, 2], tokens(5, 7), tokens(5, 8), tokens(6, 9)]
    params = [SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=6, ignore_eos=True)] * 3
    params += [BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)] * 2
    generated = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    stats = llm.engine.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    assert stats.num_blocks_copied > 0
    return generated


SMALL_POOL = {"num_blocks": 14, "max_num_batched_tokens": 16, "watermark": 0.0}

# ── anywhere: its operators ───────────────────────────────────────────────────────────────────────


@cache
def kernels() -> dict[str, set[str]]:
    """PyTorch's own list: operator → the backends for which it has a kernel ("MPS", "CPU", …)."""
    listed = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    found: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    for entry in listed.read_text(encoding="utf-8").split("\n- func: ")[1:]:
        name = entry.partition("(")[0]
        found[name] = set()
        for line in entry.splitlines()[1:]:
            field, _, value = line.partition("#")[0].strip().partition(":")
            if line.startswith("    "):  # the kernels of "dispatch"
                found[name].update(key.strip() for key in field.split(","))
            if field == "structured_delegate":
                delegates[name] = value.strip()
            if field == "autogen":
                found.update({made.strip(): {"CompositeExplicitAutograd"} for made in value.split(",")})
    return found | {name: found[name] | found[to] for name, to in delegates.items()}


class Operators(TorchDispatchMode):
    """Computes on the CPU, and fails on what MPS has not: an operator without a kernel for it, or float64."""

    seen: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler, which takes seconds, to keep it from this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = func.name().removeprefix("aten::")
        can = kernels()[name]
        if not can & {"MPS", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}:
            assert not can or "CompositeImplicitAutograd" in can, f"{name} has no kernel for MPS: {can}"
            with self:  # it is made of other operators
                return func.decompose(*args, **(kwargs or {}))
        self.seen.add(name)
        out = func(*args, **(kwargs or {}))
        assert not isinstance(out, torch.Tensor) or out.dtype not in WIDE, f"{name} gives {out.dtype}"
        return out


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with Operators():
            return function(*args)

    return call


def test_every_operator_has_a_kernel(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model, attention, and the moves of blocks; samples are drawn on the CPU."""
    monkeypatch.setattr(ModelRunner, "forward", watched(ModelRunner.forward))
    monkeypatch.setattr(Model, "logits", watched(Model.logits))
    run_in_a_small_pool(engine(oracle, "cpu", **SMALL_POOL))
    assert {"linear", "index_copy_", "_softmax", "copy_", "embedding"} <= Operators.seen


# ── on a Mac: whole runs ──────────────────────────────────────────────────────────────────────────


@on_a_mac
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_preemption_copies_and_chunks(qwen3: Oracle, preemption: str) -> None:
    options = SMALL_POOL | {"preemption": preemption}
    runs = [run_in_a_small_pool(engine(qwen3, device, **options)) for device in DEVICES]
    assert runs[0] == runs[1]
