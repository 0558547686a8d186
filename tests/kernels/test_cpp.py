"""The C++ kernels: numbers, the engine with them, and what happens where they cannot be built."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CPU, LAYER, LENGTHS, TOLERANCE, Case
from conftest import KERNELS, KINDS, Oracle, random_prompts, serve, tokens_of
from torch import Tensor

from nanopaged import LLM, SamplingParams
from nanopaged.attention import choose_backend, cpp_backend, make_backend
from nanopaged.attention.metadata import AttentionMetadata, slots_of
from nanopaged.kernels import build, cpp
from nanopaged.kv_cache import KVCache, KVShape
from nanopaged.model import decoder

SMALL = KVShape(1, 1, 8, torch.float32)


@pytest.fixture(autouse=True)
def built_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of these sources, in a folder of the tests."""
    if not build.compiler():
        pytest.skip("no C++ compiler (Debian and Ubuntu: apt install g++)")
    monkeypatch.setenv("NANOPAGED_CACHE", str(KERNELS))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many; afterwards, as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TOLERANCE)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if cpp.why_no_cpp(CPU, 8, request.param) is not None:
        pytest.skip("this processor cannot convert float16")
    return request.param


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("block_size", [1, 4, 7, 16, 100])
def test_attention_equals_a_dense_softmax(lengths: list[tuple[int, int]], block_size: int) -> None:
    """Groups of 1, 3 and 16 heads. What the slots without a token hold is never read: NaN."""
    for heads, head_dim in (((4, 4), 8), ((6, 2), 20), ((16, 1), 64)):
        Case(lengths, block_size, heads, head_dim, unused=math.nan).check("cpp")


@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 80, 96, 128, 192, 256])
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    Case([(70, 1), (0, 1), (31, 1), (32, 1)], 16, (6, 2), head_dim, dtype, unused=math.nan).check("cpp")


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 8), ((6, 2), 20), ((16, 1), 64)])
def test_prefills_longer_than_a_tile(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, threads: None
) -> None:
    """Whole and partial tiles of queries and keys, beside a decode."""
    lengths = [(70, 1), (0, 33), (0, 300), (513, 2), (255, 64), (256, 31)]
    Case(lengths, 16, heads, head_dim, dtype, unused=math.nan).check("cpp")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 5, 8])
def test_a_value_that_is_not_finite_reaches_no_query_before_it(
    position: int, value: float, dtype: torch.dtype
) -> None:
    """In tiles, queries and keys after them are computed together, and 0 · NaN is NaN."""
    case = Case([(0, 9)], 4, (2, 2), 8, dtype)
    expected = case.run("cpp")[:position]
    case.v[position, 0, 0] = value
    out = case.run("cpp")
    torch.testing.assert_close(out[:position], expected, atol=0, rtol=0)
    assert not out[position:, 0, 0].isfinite().any()


def shared_decodes(rng: np.random.Generator, block_size: int, num_blocks: int) -> AttentionMetadata:
    """Nine sequences with one new token each, whose tables share blocks like the branches of a tree."""
    fresh = iter(rng.permutation(num_blocks).tolist())
    tables: list[list[int]] = [[]]
    lens = [0]
    for _ in range(9):
        parent = rng.integers(len(tables))
        shared = tables[parent][: rng.integers(lens[parent] // block_size + 1)]  # full blocks
        tables.append(shared + [next(fresh) for _ in range(rng.integers(1, 12))])
        lens.append(len(tables[-1]) * block_size - rng.integers(block_size))
    del tables[0], lens[0]
    last = [table[-1] * block_size + (n - 1) % block_size for table, n in zip(tables, lens, strict=True)]
    ones, seq_ids = np.ones(9, dtype=np.int64), list(range(9))
    return AttentionMetadata(ones, np.array(lens), tables, np.array(last), 9, seq_ids)


@pytest.mark.parametrize("run_keys", [1, 64, 512])
@pytest.mark.parametrize(("seed", "block_size"), [(0, 4), (1, 16), (2, 4), (3, 16)])
def test_shared_blocks_and_runs(
    seed: int, block_size: int, run_keys: int, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of tables: every sequence gets what it gets alone, for any cut of the contexts into runs."""
    monkeypatch.setattr(cpp_backend, "RUN_KEYS", run_keys)
    metadata = shared_decodes(np.random.default_rng(seed), block_size, num_blocks=100)
    cache = KVCache(KVShape(2, 2, 24, torch.float32), 100, block_size, CPU)
    cache.data.normal_()
    q, k, v = (torch.randn(9, n, 24) for n in (6, 2, 2))
    outs = []
    for backend in ("reference", "cpp"):
        attention = make_backend(backend, cache, 24**-0.5)
        attention.begin_step(metadata)
        outs.append(attention(LAYER, q, k, v))
    torch.testing.assert_close(outs[1], outs[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("run_keys", [1, 8, 1000])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_shared_blocks_are_found(
    seed: int, block_size: int, run_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each context is read whole and in order, and each block once. Block 100 is for tokens to come."""
    monkeypatch.setattr(cpp_backend, "RUN_KEYS", run_keys)
    metadata = shared_decodes(np.random.default_rng(seed), block_size, num_blocks=100)
    tables, lens = metadata.block_tables, metadata.context_lens.tolist()
    runs = list(cpp_backend.find_runs([[*table, 100] for table in tables], lens, block_size))
    slots: list[list[int]] = [[] for _ in tables]
    for blocks, num_keys, seqs in runs:
        assert 0 < len(blocks) <= max(1, run_keys // block_size)
        for seq in seqs:
            slots[seq] += slots_of(blocks, np.arange(num_keys), block_size).tolist()
    for table, length, found in zip(tables, lens, slots, strict=True):
        assert found == slots_of(table, np.arange(length), block_size).tolist()
    assert sum(len(blocks) for blocks, _, _ in runs) == len(set().union(*tables))


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_nan_of_a_live_token_is_not_hidden(part: str) -> None:
    """The engine refuses logits that are not finite, so attention must not swallow what makes them so."""
    case = Case([(9, 1), (20, 1)], 4, (2, 2), 8)
    getattr(case, part)[1] = math.nan
    out = case.run("cpp")
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


# ── the fused operations ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (3, 17), (5, 64), (700, 100)])
def test_rms_norm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(num_tokens, 2 * size).to(dtype) * 3, torch.randn(size).to(dtype)
    x = wide[:, :size]  # rows that are not contiguous
    expected = decoder.rms_norm(x.float(), 1e-3, weight.float())
    assert_close(cpp.rms_norm(x, 1e-3, weight), expected, dtype)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_q", "num_k", "head_dim"), [(2, 1, 8), (17, 1, 20), (6, 2, 2), (28, 4, 128)])
def test_norm_rotate(num_q: int, num_k: int, head_dim: int, normalise: bool, dtype: torch.dtype) -> None:
    """On part of a wider projection, whose other values stay unchanged."""
    qkv = torch.randn(70, num_q + 2 * num_k, head_dim).to(dtype) * 3
    weights = tuple(torch.randn(2, head_dim).to(dtype)) if normalise else None
    angles = torch.randn(70, 1, head_dim // 2) * 10
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1).to(dtype), angles.sin().to(dtype)
    before, qk = qkv.clone(), qkv[:, : num_q + num_k]
    floats = (weights[0].float(), weights[1].float()) if weights is not None else None
    expected = decoder.norm_rotate(qk.float(), num_q, floats, 1e-3, cos.float(), sin.float())
    assert_close(cpp.norm_rotate(qk, num_q, weights, 1e-3, cos, sin), expected, dtype)
    assert torch.equal(qkv[:, num_q + num_k :], before[:, num_q + num_k :])


@pytest.mark.parametrize("width", [1, 16, 48, 1025])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    """Also of gates so large that e^-x is infinite or 0."""
    gate_up = torch.randn(70, 2 * width).to(dtype) * 5
    gate_up[:3, 0] = torch.tensor([-1000, 1000, math.nan])
    expected = decoder.silu_mul(gate_up.float()).nan_to_num(99)
    assert_close(cpp.silu_mul(gate_up).nan_to_num(99), expected, dtype)


# ── linear layers ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(1, 1), (3, 5), (7, 16), (64, 33), (65, 70), (1025, 300)]
)
def test_linear_layers(num_inputs: int, num_outputs: int, dtype: torch.dtype, threads: None) -> None:
    """Odd sizes and every tile, with a bias or none, beside float64."""
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype)
    scale = num_inputs**0.5  # sums are rounded as in float32, and the result to its dtype
    for num_tokens in (*range(1, 15), 70):
        x = torch.randn(num_tokens, num_inputs).to(dtype)
        product = x.double() @ weight.double().T
        assert_close(cpp.PackedLinear(weight, None)(x) / scale, product / scale, dtype)
        assert_close(cpp.PackedLinear(weight, bias)(x) / scale, (product + bias) / scale, dtype)


def test_linear_layers_keep_nan_and_infinity_in_their_row(dtype: torch.dtype) -> None:
    x = torch.randn(9, 7).to(dtype)
    x[4, 6] = math.nan
    x[7, 6] = math.inf  # the last of an odd number of inputs
    out = cpp.PackedLinear(torch.rand(21, 7).to(dtype) + 1, None)(x)
    assert out[4].isnan().all()
    assert (out[7] == math.inf).all()
    finite = [row for row in range(9) if row not in (4, 7)]
    assert out[finite].isfinite().all()


def test_a_token_gets_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """A sum is added up in the order of the inputs, whatever the tile."""
    x = torch.randn(70, 65).to(dtype)
    linear = cpp.PackedLinear(torch.randn(300, 65).to(dtype), None)
    together = linear(x)
    for num_tokens in (1, 2, 3, 5, 8, 33):
        assert torch.equal(linear(x[:num_tokens]), together[:num_tokens])


# ── the engine ────────────────────────────────────────────────────────────────────────────────────


def test_all_linear_layers_of_a_model_are_packed(qwen3: Oracle, dtype: torch.dtype) -> None:
    """No test of outputs would notice that they are slower, or that the weights are there twice."""
    name = str(dtype).removeprefix("torch.")
    model = LLM(qwen3.folder, num_blocks=8, dtype=name, attention_backend="cpp").engine.runner.model
    linears = [module for module in model.modules() if isinstance(module, decoder.Linear)]
    assert len(linears) == 2 * 4 + 1
    for linear in linears:
        assert (linear.packed is not None) == (not hasattr(linear, "weight")) == cpp.has_linear(dtype)


def test_the_engine_gives_the_tokens_of_transformers(oracle: Oracle) -> None:
    """Greedy and with log-probabilities, for each family: chunks, decodes and a prefix that is found."""
    prompts = random_prompts(4, seed=5, longest=60)
    prompts += [prompts[-1] + [3, 4]]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    options = {"block_size": 4, "num_blocks": 100, "max_num_batched_tokens": 24}
    llm = LLM(oracle.folder, dtype="float32", attention_backend="cpp", **options)
    oracle.check(serve(llm, prompts, params))


DEFAULTS = {  # process-wide, or a thread's: how it is set
    **{str(dtype): partial(torch.set_default_dtype, dtype) for dtype in (torch.bfloat16, torch.float64)},
    "device": lambda: torch.set_default_device("meta"),
    "grad": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "threads": lambda: torch.set_num_threads(3),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "denormals": lambda: torch.set_flush_denormal(True),
}


@contextmanager
def changed(name: str) -> Iterator[None]:
    """One of them; afterwards all are as before."""
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    DEFAULTS[name]()
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(grad)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_no_tensor_depends_on_a_process_wide_default(qwen3: Oracle, backend: str) -> None:
    """A float32 or CPU tensor that was only assumed to be one would be overrun by the kernels.

    Another thread changes some of them while it loads a model with transformers: before or after `LLM()`.
    """
    prompts = random_prompts(2, seed=8, longest=40)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    all_filters = SamplingParams(top_k=9, top_p=0.9, min_p=0.01, presence_penalty=1, seed=7, max_tokens=8)
    kinds = [greedy, KINDS["several"], KINDS["beams"], all_filters]

    def make() -> LLM:
        options = {"block_size": 4, "num_blocks": 60, "preemption": "recompute"}
        return LLM(qwen3.folder, attention_backend=backend, **options)

    def outputs_of(llm: LLM) -> list[list[list[int]]]:
        llm.reset_prefix_cache()
        return [tokens_of(serve(llm, prompts, kind)) for kind in kinds]

    before = make()
    expected = outputs_of(before)
    assert expected[0] == [qwen3.greedy(prompt, 8) for prompt in prompts]
    for name in DEFAULTS:
        with changed(name):
            cpp.load.cache_clear()
            assert outputs_of(before) == outputs_of(make()) == expected, name


# ── other compilers and processors ────────────────────────────────────────────────────────────────

SANITIZE = "-fno-sanitize-recover=all -fsanitize"  # such kernels end the process at the first mistake


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="how a sanitizer is loaded depends on the system")
@pytest.mark.parametrize(
    ("compiler", "mark"),
    [
        (f"g++ {SANITIZE}=undefined", b"__ubsan_"),
        (f"g++ {SANITIZE}=address", b"__asan_"),
        ("g++ -march=x86-64-v3", b""),
        ("clang++", b""),
        ("clang++ -march=x86-64-v3", b""),
    ],
)
def test_other_builds_compute_the_same(compiler: str, mark: bytes, tmp_path: Path) -> None:
    """All tests of numbers above, once more, with kernels for other registers and by other compilers."""
    program = compiler.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"no {program} (Debian and Ubuntu: apt install {program.strip('+')})")
    if "x86-64" in compiler and platform.machine() != "x86_64":
        pytest.skip("this machine has other instructions")
    env = os.environ | {"CXX": compiler, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if mark == b"__asan_":  # must be loaded before Python itself
        found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
        env |= {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": found.stdout.strip()}
    numbers = "attention or sizes or prefills or finite or shared or norm or silu or linear or tokens or nan"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "-k", numbers]
    done = subprocess.run([*command, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (library,) = tmp_path.glob("*/kernels-*.so")
    assert mark in library.read_bytes()


@pytest.mark.slow
def test_an_arm_processor_computes_the_same(tmp_path: Path) -> None:
    """driver.cpp prints what every kernel computes, here and in an emulator of another processor."""
    for program in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} (Debian: apt install g++-aarch64-linux-gnu qemu-user)")
    options = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-I", build.FOLDER]
    program, driver = tmp_path / "program", Path(__file__).with_name("driver.cpp")
    printed = []
    for compiler, emulator in (
        ([*build.compiler()[:1], "-march=native"], []),
        (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64"]),
    ):
        subprocess.run([*compiler, *options, driver, "-o", program], check=True)
        done = subprocess.run([*emulator, program], capture_output=True, text=True, check=True)
        printed.append(done.stdout.splitlines())
    for line, line_on_arm in zip(*printed, strict=True):
        name, *numbers = line.split()
        name_on_arm, *numbers_on_arm = line_on_arm.split()
        assert name_on_arm == name
        # One rounding of bfloat16, the coarsest of the types. With pairs of it, the weights of a prefill are
        # rounded as well. They add up to 1, and values are below 1, so this changes an output by up to 2⁻⁹.
        smallest = 2**-9 if name == "paged_prefill" else 1e-3
        expected = pytest.approx(np.array(numbers, float), rel=2**-7, abs=smallest)
        assert np.array(numbers_on_arm, float) == expected


# ── building ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the library that does not exist yet, in a process that has loaded none."""
    monkeypatch.setenv("NANOPAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NANOPAGED_BUILD")
    cpp.load.cache_clear()
    yield tmp_path / "cache"
    cpp.load.cache_clear()


def backend_of(backend: str) -> str:
    return choose_backend(backend, CPU, SMALL)


@pytest.mark.slow
def test_auto_builds_the_kernels_once(
    nothing_built: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with NANOPAGED_BUILD=0, which takes what was built."""
    with monkeypatch.context() as patch:
        patch.setenv("NANOPAGED_BUILD", "0")
        assert backend_of("auto") == "torch"
    assert not nothing_built.exists()
    assert backend_of("auto") == "cpp"
    (line,) = caplog.messages
    assert line.startswith("building the C++ kernels with ")
    assert list(nothing_built.iterdir()) == [build.library_path()]
    monkeypatch.setenv("NANOPAGED_BUILD", "0")
    cpp.load.cache_clear()
    assert backend_of("auto") == "cpp"
    assert len(caplog.messages) == 1


def test_the_name_tells_sources_and_flags_apart(
    nothing_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another source or flag is another library, so an old one is never loaded for it."""
    names = {build.library_path()}
    monkeypatch.setenv("CXX", "c++ -O2")
    names.add(build.library_path())
    changed = tmp_path / "fused.cpp"
    changed.write_text((build.FOLDER / "fused.cpp").read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCES", [build.SOURCES[0], changed])
    names.add(build.library_path())
    assert len(names) == 3


def test_without_a_compiler_the_error_says_what_to_install(
    nothing_built: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nonsense in ("no-such-compiler", '"', "' '", "c++'", "-v", " no-such -v"):
        monkeypatch.setenv("CXX", nonsense)
        with pytest.raises(ValueError, match=r"there is no C\+\+ compiler: install one .*apt install g\+\+"):
            backend_of("cpp")
        assert backend_of("auto") == "torch"
    assert not caplog.records


LIBRARY = torch._C.__file__  # without our functions
TROUBLES = {  # what a compiler of our own does → what is said
    "echo 'error: no such type' >&2; exit 1": "could not build.*no such type",
    "exec sleep 30": "cannot be built or loaded .*timed out.*: set NANOPAGED_CACHE",
    "true": "cannot be built or loaded .*: set NANOPAGED_CACHE",  # it writes nothing
    "printf '\\377' >&2; exit 1": "could not build them: \ufffd",
    "head -c 9 /dev/zero > /dev/full": "could not build.*No space left on device",
    'while [ "$1" != -o ]; do shift; done; echo x > "$2"': "built or loaded .*: set NANOPAGED_CACHE",
    f'while [ "$1" != -o ]; do shift; done; cp {LIBRARY} "$2"': "undefined symbol: paged_decode",
}


@pytest.mark.parametrize(
    ("script", "folder"), [*((script, "new") for script in TROUBLES), ("true", "a file"), ("true", "no home")]
)
def test_what_goes_wrong_is_said_once(
    script: str,
    folder: str,
    nothing_built: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ "cpp" raises one ValueError, "auto" warns and goes on with PyTorch."""
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "TIMEOUT", 0.5)
    if folder == "a file":
        nothing_built.write_text("a file", encoding="utf-8")
    if folder == "no home":
        monkeypatch.delenv("NANOPAGED_CACHE")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("there is no home")))
    message = f"(?s)attention_backend='cpp' cannot run here: .*{TROUBLES[script]}"
    with pytest.raises(ValueError, match=message):
        backend_of("cpp")
    caplog.clear()
    cpp.load.cache_clear()
    assert backend_of("auto") == "torch"
    (warning,) = (message for message in caplog.messages if not message.startswith("building"))
    assert "attention_backend='cpp' is not used" in warning
    if LIBRARY not in script and folder == "new":
        assert list(nothing_built.iterdir()) == [], "what cannot be loaded is not kept"


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
@pytest.mark.parametrize("part", ["folder", "library"])
@pytest.mark.parametrize("how", [0o777, 0o775, "owner"])
def test_what_another_user_can_write_is_not_loaded(
    part: str, how: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is the right one here, but they could exchange it. Nothing is built beside it either."""
    assert backend_of("cpp") == "cpp"
    folder = tmp_path / "cache"
    folder.mkdir(0o755)
    shutil.copy(build.library_path(), folder)
    monkeypatch.setenv("NANOPAGED_CACHE", str(folder))
    monkeypatch.delenv("NANOPAGED_BUILD")
    files = set(folder.iterdir())
    path = folder if part == "folder" else build.library_path()
    if isinstance(how, int):
        path.chmod(how)
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    cpp.load.cache_clear()
    message = f"other users can write {folder}.*chmod go-w.*: set NANOPAGED_CACHE"
    with pytest.raises(ValueError, match=message):
        backend_of("cpp")
    assert backend_of("auto") == "torch"
    assert set(folder.iterdir()) == files
    cpp.load.cache_clear()


def test_what_the_kernels_cannot_do_is_refused() -> None:
    wide = KVShape(1, 1, 264, torch.float32)
    assert choose_backend("auto", CPU, wide) == "torch"
    with pytest.raises(ValueError, match="a head_dim of up to 256, not 264"):
        choose_backend("cpp", CPU, wide)
    with pytest.raises(ValueError, match="no place for a score_mod"):
        choose_backend("cpp", CPU, SMALL, lambda layer, scores, queries, keys: scores)
    assert choose_backend("auto", CPU, SMALL, lambda layer, scores, queries, keys: scores) == "torch"
    with pytest.raises(ValueError, match="its kernels run on a CPU, not on meta"):
        choose_backend("cpp", torch.device("meta"), SMALL)
