"""Models whose weights are read, and files that are refused; test_checkpoints.py has tables of both."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Oracle, make_checkpoint
from safetensors.torch import load_file
from test_checkpoints import INDEX, TOKENIZER, WEIGHTS, entries

from nanopaged import LLM, EngineConfig, SamplingParams
from nanopaged.kernels import build
from nanopaged.memory import pick_dtype
from nanopaged.model.checkpoint import TINY_MODEL, load_model
from nanopaged.model.model_config import read_model_config
from nanopaged.parallel import Ranks

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def folder(tmp_path: Path, qwen3: Oracle) -> Path:
    """A copy of the checkpoint of `qwen3`, to be changed."""
    return Path(shutil.copytree(qwen3.folder, tmp_path / "model"))


def greedy(folder: Path | str, prompt: list[int], **config: object) -> list[int]:
    llm = LLM(folder, num_blocks=64, **config)
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


# ── what must load ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.7), ("float16", 0.7), ("float32", 1e-4)])
def test_dtypes(oracle: Oracle, dtype: str, tolerance: float) -> None:
    """Computed in that dtype: prompt and output have log-probabilities close to those of float32."""
    llm = LLM(oracle.folder, num_blocks=8, dtype=dtype)
    assert llm.engine.runner.dtype == getattr(torch, dtype)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    (output,) = llm.generate([3, 1, 4, 1, 5, 9, 2, 6] * 4, params, use_tqdm=False)
    (completion,) = output.outputs
    tokens = output.prompt_token_ids + completion.token_ids
    got = [*output.prompt_logprobs[1:], *completion.logprobs]
    for row, token_id, logprobs in zip(oracle.logprobs(tokens)[:-1], tokens[1:], got, strict=True):
        assert logprobs[token_id] == pytest.approx(row[token_id].item(), abs=tolerance)


@pytest.mark.parametrize(
    ("machine", "checkpoint", "asked", "expected", "told"),
    [
        ("AVX2", "bfloat16", "auto", torch.float32, "the checkpoint is read as float32"),
        ("AVX2", "bfloat16", "bfloat16", torch.bfloat16, "dtype='float32' is faster"),
        ("AVX2 and a compiler", "bfloat16", "auto", torch.bfloat16, None),
        ("AVX512", "bfloat16", "auto", torch.bfloat16, None),
        ((7, 5), "bfloat16", "auto", torch.float16, "the checkpoint is read as float16"),
        ((7, 5), "float32", "auto", torch.float32, None),
        ((7, 5), "bfloat16", "bfloat16", torch.bfloat16, "dtype='float16' is faster"),
        ((7, 5), "bfloat16", "float32", torch.float32, None),
        ((8, 0), "bfloat16", "auto", torch.bfloat16, None),
    ],
)
def test_bfloat16_where_it_is_slow(
    machine: str | tuple[int, int],
    checkpoint: str,
    asked: str,
    expected: torch.dtype,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PyTorch has no fast bfloat16 without AVX-512; the C++ kernels have. A T4 (7.5) has none."""
    device = torch.device("cpu" if isinstance(machine, str) else "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: machine.split()[0])
    monkeypatch.setattr(build, "can_build_or_load", lambda: "compiler" in machine)
    assert pick_dtype(EngineConfig(dtype=asked), checkpoint, device) == expected
    assert caplog.messages == ([f"{device} has no instructions for bfloat16: {told}"] if told else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_weights_that_was_never_written(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 97 tokens, rank 1 of 2 has 48, and one row beyond the vocabulary, which must not count as damage.
    It has no biases of o and down, since rank 0 adds them."""
    whole = make_checkpoint("llama", tmp_path, attention_bias=True, mlp_bias=True)
    entries(tie_word_embeddings=True)(tmp_path)  # it has a head of its own
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    model = load_model(
        config=EngineConfig(max_model_len=8, tensor_parallel_size=2),
        model_config=read_model_config(tmp_path),
        folder=tmp_path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranks=Ranks(rank, size=2, store=None),
    )
    assert all(weight.isfinite().all() for weight in model.parameters())
    rows = model.embed_tokens.weight
    assert rows.shape[0] == 49
    assert torch.equal(rows[: 49 - rank], whole.get_input_embeddings().weight[rank * 49 :][:49])
    head = model.lm_head(torch.eye(48)).T
    assert head[: 49 - rank].allclose(whole.lm_head.weight[rank * 49 :][:49], atol=1e-6)
    bias = model.layers[0].mlp.down_proj.bias
    assert (bias is not None) == (rank == 0)


def test_dummy_weights_need_only_a_config(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    outputs = [greedy(folder, [1, 2, 3], load_format="dummy", seed=seed) for seed in (0, 0, 1, 10**30)]
    assert len(outputs[0]) > 0
    assert outputs[0] == outputs[1]
    assert outputs[0] not in outputs[2:]
    with pytest.raises(FileNotFoundError, match="safetensors"):
        LLM(folder, num_blocks=8)


# ── files, and what they may not do ───────────────────────────────────────────────────────────────


def test_links_to_elsewhere_as_in_the_hubs_cache(qwen3: Oracle, folder: Path) -> None:
    (folder.parent / "blobs").mkdir()
    for file in list(folder.iterdir()):
        file.rename(folder.parent / "blobs" / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    assert greedy(folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)
    index = {"weight_map": dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert greedy(folder, [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)


def test_missing_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("x" * 5000, "no\0name"):
        with pytest.raises(FileNotFoundError, match="is not a folder"):
            LLM(name)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path)
    download = "nanopaged.model.checkpoint.snapshot_download"
    monkeypatch.setattr(download, lambda *_, **__: pytest.fail("a path is not a hub id"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    paths = ("/no/such", "./no-such", "../no-such", "~/no-such", "~not-a-user/model")
    for name in (*paths, *map(Path, paths), tmp_path / "no-such-folder", tmp_path / "file"):
        with pytest.raises(FileNotFoundError, match="is not a folder: name the one that holds"):
            LLM(name)


def test_a_hub_id_is_downloaded(qwen3: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repo: str, **patterns: list[str]) -> str:
        asked[repo] = patterns
        return str(qwen3.folder)

    monkeypatch.setattr("nanopaged.model.checkpoint.snapshot_download", download)
    assert greedy("some-lab/model", [1, 2, 3]) == qwen3.greedy([1, 2, 3], 10)
    assert "*.safetensors" in asked["some-lab/model"]["allow_patterns"]


def test_no_code_of_a_checkpoint_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks whether to run it, and a pipe may answer yes."""
    folder = tmp_path / "model"
    make_checkpoint("llama", folder)
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)
    (folder / "evil.py").write_text(f"class T: open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    classes = {"AutoConfig": "evil.T", "AutoTokenizer": ["evil.T", "evil.T"]}
    entries(auto_map=classes)(folder)
    entries(TOKENIZER, tokenizer_class="T", auto_map=classes)(folder)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ValueError, match="without code of its own"):
        LLM(folder, num_blocks=8)
    assert not (tmp_path / "ran").exists()
