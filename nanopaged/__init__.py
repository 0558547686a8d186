"""nanopaged: PagedAttention that you can read in an evening and run with or without a GPU."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanopaged.checks.foreign_names import explain_import
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.text.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from nanopaged.engine import LLMEngine
    from nanopaged.llm import LLM

# OpenMP (libgomp, in PyTorch for Linux) reads it when torch is imported: on a CPU, a thread that waits for
# another one spins for a short time and then sleeps. By default it spins 150 times as long, and on a busy
# machine it may spin for one that has no core ("A busy machine" in docs/benchmarks.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__version__ = "0.4.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "EngineStats",
    "LLMEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]

_WITH_TORCH = {"LLM": "nanopaged.llm", "LLMEngine": "nanopaged.engine"}


def __getattr__(name: str) -> Any:
    """Import PyTorch only with the names that need it; scripts over the bookkeeping alone start at once."""
    if name not in _WITH_TORCH:
        if (explanation := explain_import(name)) is not None:
            raise ImportError(explanation)  # `from nanopaged import …` would hide the text of another error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)


def _open_trace(engine: LLMEngine) -> None:
    """The option `trace`: an engine that has it gets a listener. The engine itself knows of no trace."""
    if engine.config.trace is not None:
        from nanopaged.trace.recorder import Recorder

        engine.listeners.append(Recorder(engine))


EngineConfig.on_start.append(_open_trace)


def __dir__() -> list[str]:
    return __all__
