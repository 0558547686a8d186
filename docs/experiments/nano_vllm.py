"""Host time of a decode step in nano-vllm, from a checkout of it: its scheduler and batch preparation.

Its model is left out. Stubs stand in for the modules that it needs for the model (flash-attn among them), and
copies to the GPU stay on the host. github.com/GeeeekExplorer/nano-vllm
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

NOT_NEEDED = {
    "nanovllm.config": ["Config"],
    "nanovllm.models.qwen3": ["Qwen3ForCausalLM"],
    "nanovllm.layers.sampler": ["Sampler"],
    "nanovllm.utils.loader": ["load_model"],
}


@contextmanager
def import_nano_vllm(checkout: Path) -> Iterator[SimpleNamespace]:
    """Its scheduler, sequence, parameters and runner, importable while this lasts."""
    package = ModuleType("nanovllm")
    package.__path__ = [str(checkout / "nanovllm")]
    modules = {"nanovllm": package}
    for name, members in NOT_NEEDED.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(dict.fromkeys(members))
    with mock.patch.dict(sys.modules, modules):
        from nanovllm.engine.model_runner import ModelRunner
        from nanovllm.engine.scheduler import Scheduler
        from nanovllm.engine.sequence import Sequence
        from nanovllm.sampling_params import SamplingParams

        yield SimpleNamespace(
            Scheduler=Scheduler, Sequence=Sequence, SamplingParams=SamplingParams, ModelRunner=ModelRunner
        )


def time_nano_vllm(checkout: Path, num_seqs: int, num_steps: int, block_size: int, seed: int) -> float:
    """Seconds of schedule, prepare and postprocess in a step of `num_seqs` decodes, the median."""
    make_tensor, rng = torch.tensor, random.Random(seed)

    def unpinned(*args: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return make_tensor(*args, **options)

    with import_nano_vllm(checkout) as nano, mock.patch("torch.tensor", unpinned):
        config = SimpleNamespace(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=1 << 20,
            eos=-1,
            kvcache_block_size=block_size,
            num_kvcache_blocks=num_seqs * (math.ceil((100 + num_steps) / block_size) + 1),
        )
        nano.Sequence.block_size = block_size
        scheduler, runner = nano.Scheduler(config), nano.ModelRunner.__new__(nano.ModelRunner)
        runner.block_size = block_size
        params = nano.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_steps)
        for _ in range(num_seqs):
            scheduler.add(nano.Sequence([rng.randrange(32000) for _ in range(100)], params))
        seconds = []
        with mock.patch.object(torch.Tensor, "cuda", lambda self, **_: self):
            while not scheduler.is_finished():
                began = time.perf_counter()
                sequences, is_prefill = scheduler.schedule()
                prepare = runner.prepare_prefill if is_prefill else runner.prepare_decode
                prepare(sequences)
                runner.prepare_sample(sequences)
                scheduler.postprocess(sequences, [7] * len(sequences), is_prefill)
                seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:-1])  # without the prefill and the end
