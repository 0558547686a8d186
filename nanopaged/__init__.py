"""nanopaged: PagedAttention you can read in an evening, on whatever machine you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.text.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from nanopaged.engine import LLMEngine
    from nanopaged.llm import LLM

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
    """What loads PyTorch is loaded when it is asked for; scheduler and block manager do without."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)


def __dir__() -> list[str]:
    return __all__
