"""Output tokens per second of 16 requests on the tiny model, with different numbers of adapters.

    OMP_NUM_THREADS=1 python measure.py

Seconds are CPU time of this process, so that other programs count little.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanopaged import LLM, SamplingParams

SHAPES = {  # of the tiny model's projections: out_features, in_features
    **{"self_attn.q_proj": (256, 256), "self_attn.k_proj": (64, 256), "self_attn.v_proj": (64, 256)},
    **{"self_attn.o_proj": (256, 256), "mlp.gate_proj": (640, 256), "mlp.up_proj": (640, 256)},
    **{"mlp.down_proj": (256, 640)},
}


def random_adapter(folder: Path, seed: int, r: int = 8) -> Path:
    """Random A and B for all projections of the tiny model, in the files that PEFT writes."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(4):
        for name, (out_features, in_features) in SHAPES.items():
            stem = f"base_model.model.model.layers.{layer}.{name}.lora_"
            weights[f"{stem}A.weight"] = 0.05 * torch.randn(r, in_features, generator=generator)
            weights[f"{stem}B.weight"] = 0.05 * torch.randn(out_features, r, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "r": r,
        "lora_alpha": 2 * r,
        "target_modules": "all-linear",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def main() -> None:
    """Rounds in which all cases take turns; the first does not count."""
    with tempfile.TemporaryDirectory() as folder:
        names = {str(i): random_adapter(Path(folder) / str(i), seed=i) for i in range(4)}
        plain, engine = LLM(num_blocks=400), LLM(num_blocks=400, adapters=names)
    cases = {"an engine without adapters": (plain, [None]), "0 of 4": (engine, [None])}
    cases |= {f"{n} of 4": (engine, list(names)[:n]) for n in (1, 2, 4)}
    rates: dict[str, list[float]] = {case: [] for case in cases}
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    for i in range(4):
        for case, (llm, used) in cases.items():
            prompts = [{"prompt": "ROMEO:\n" + "a" * k, "adapter": used[k % len(used)]} for k in range(16)]
            began = time.process_time()
            llm.generate(prompts, params, use_tqdm=False)
            rates[case] += [16 * 128 / (time.process_time() - began)] if i > 0 else []
    for case, numbers in rates.items():
        print(f"| {case} | {statistics.median(numbers):,.0f} | {min(numbers):,.0f} to {max(numbers):,.0f} |")


if __name__ == "__main__":
    main()
