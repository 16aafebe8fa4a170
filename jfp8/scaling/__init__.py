"""Formats, casts, arrays ``data * scale``, and how a scale is computed from data.

``scale = amax / fmt.max`` maps the largest element onto the largest value of the format.
"""

from jfp8.scaling import serialization as serialization
from jfp8.scaling.granularity import Block, PerAxis, PerTensor
from jfp8.scaling.scales import amax, scale_from_amax
from jfp8.scaling.sink import init_sink
from jfp8.scaling.state_in_gradients import init_overwritten, read_overwritten
from jfp8.tracing.listing import listing

__all__ = [
    "Block",
    "PerAxis",
    "PerTensor",
    "amax",
    "init_overwritten",
    "init_sink",
    "read_overwritten",
    "scale_from_amax",
]

__dir__ = listing(__all__)
