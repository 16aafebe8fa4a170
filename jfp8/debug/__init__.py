"""Statistics of every tensor in FP8, advice and comparisons."""

from jfp8.debug.advice import Advice, advice
from jfp8.debug.causality import looks_ahead
from jfp8.debug.compare import ComparedGradient, ComparedProduct, Comparison, ProductError, compare
from jfp8.debug.decoding import DecodingMismatch, mismatch
from jfp8.debug.faults.evidence import Finding
from jfp8.debug.program import Quantized, check_program
from jfp8.debug.recommend import Recommendation, recommend
from jfp8.debug.recorder import Recorder
from jfp8.debug.records import TensorStats, read_jsonl, write_jsonl
from jfp8.debug.stats import stats
from jfp8.tracing.listing import listing

__all__ = [
    "Advice",
    "ComparedGradient",
    "ComparedProduct",
    "Comparison",
    "DecodingMismatch",
    "Finding",
    "ProductError",
    "Quantized",
    "Recommendation",
    "Recorder",
    "TensorStats",
    "advice",
    "check_program",
    "compare",
    "looks_ahead",
    "mismatch",
    "read_jsonl",
    "recommend",
    "stats",
    "write_jsonl",
]

__dir__ = listing(__all__)
