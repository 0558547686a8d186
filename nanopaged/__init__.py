"""nanopaged: PagedAttention you can read in an evening, on whatever machine you have."""

from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.engine import LLMEngine
from nanopaged.llm import LLM
from nanopaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanopaged.stats import EngineStats

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
