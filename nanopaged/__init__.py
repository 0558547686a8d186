"""nanopaged: PagedAttention that you can read in an evening and run with or without a GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from nanopaged.engine import LLMEngine
    from nanopaged.llm import LLM

__version__ = "0.8.0"

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
    """Import PyTorch only with the names that need it, because that takes seconds."""
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
