"""Traces of allocations, and what allocators make of them."""

from pipecomm.replay.compare import Comparison, Replayed, compare
from pipecomm.replay.generate import TRACES, generate
from pipecomm.replay.load import load_trace
from pipecomm.replay.recording import record_model, record_pool
from pipecomm.replay.trace import Trace

__all__ = [
    "TRACES",
    "Comparison",
    "Replayed",
    "Trace",
    "compare",
    "generate",
    "load_trace",
    "record_model",
    "record_pool",
]
