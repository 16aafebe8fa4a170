"""Faults of tensors in FP8, and the signs of each in statistics.

A fault is a function ``Run -> findings``. Elements are lost because the scale of the tensor ... ::

    is always 1                                       `no_scale`
    does not change                                   `stale_history`
    comes from a history that forgets, or lags        `short_history`
    comes from a history that remembers a spike       `long_history`
    is as good as one scale can be                    `outliers`

Before that, a tensor has to be finite, `non_finite`, and not all zero, `dead`. A tensor may also
lose too many bits without losing elements, `noise`. Two faults concern the choice of the layers in
FP8: `edges_in_fp8`, `little_in_fp8`.
"""

from jfp8.debug.faults.coverage import edges_in_fp8, little_in_fp8
from jfp8.debug.faults.evidence import Fault
from jfp8.debug.faults.histories import long_history, short_history, stale_history
from jfp8.debug.faults.values import dead, no_scale, noise, outliers

FAULTS: tuple[Fault, ...] = (
    dead,
    no_scale,
    stale_history,
    short_history,
    long_history,
    outliers,
    noise,
    edges_in_fp8,
    little_in_fp8,
)
"""Looked for in finite steps, after `non_finite`."""

NAMES = (
    "non_finite",
    "dead",
    "no_scale",
    "vanishing_gradient",
    "saturated_gradient",
    "stale_history",
    "empty_history",
    "short_history",
    "long_history",
    "outliers",
    "noise",
    "edge_in_fp8",
    "little_in_fp8",
)
"""Of their findings."""
