"""The speed of quantizing activations in published timings, used by `fit_rates.py` to judge FP8.

jfp8 has its own kernels to quantize, and uses only the bandwidth of casts from these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Pass(NamedTuple):
    """Hold the parameters of the time of a pass over an array.

    Attributes:
      launch: minimum microseconds.
      memory: TB/s of an array that is in no cache.
      cached: TB/s of an array that is.
      cache: how much is cached, in MB. Of an array twice as large, nothing is left when it is read.
    """

    launch: float
    memory: float
    cached: float
    cache: float

    def seconds(self, moved: Any) -> Any:
        """Return the time of so many bytes, again and again."""
        hits = np.clip(2 - moved / (1e6 * self.cache), 0, 1)
        return 1e-6 * self.launch + 1e-12 * moved * (hits / self.cached + (1 - hits) / self.memory)


# "amax" reads bf16 and makes one scale; "cast" reads bf16 and writes FP8. By fit_rates.py.
PASS_RATES = {
    "B200": {
        "amax": Pass(10.8, 3.3, 7.49, 44),
        "cast": Pass(1.86, 4.64, 5.1, 50.3),
    },
    "B300": {
        "amax": Pass(10.4, 3.32, 7.28, 45),
        "cast": Pass(1.65, 4.74, 5.07, 54.6),
    },
    "GB300": {
        "amax": Pass(10.1, 3.36, 7.57, 46.3),
        "cast": Pass(1.9, 5.03, 5.47, 52),
    },
    "H100": {
        "amax": Pass(7.32, 1.32, 2.9, 21.3),
        "cast": Pass(1.41, 3.05, 5.02, 26.6),
    },
    "H200": {
        "amax": Pass(7.25, 1.38, 2.91, 22.3),
        "cast": Pass(1.39, 4.17, 5, 31.3),
    },
    "L40S": {
        "amax": Pass(6.67, 0.693, 2.15, 102),
        "cast": Pass(2.17, 0.676, 6.93, 78.1),
    },
    "RTX PRO 6000": {
        "amax": Pass(8.69, 1.6, 6.59, 122),
        "cast": Pass(1.49, 1.49, 5.39, 100),
    },
    "GB200": {
        "amax": Pass(10.8, 3.3, 7.49, 44),
        "cast": Pass(1.86, 4.64, 5.1, 50.3),
    },
    "RTX 4090": {
        "amax": Pass(8.69, 0.9, 6.59, 122),
        "cast": Pass(1.49, 0.838, 5.39, 100),
    },
    "RTX 5090": {
        "amax": Pass(8.69, 1.6, 6.59, 122),
        "cast": Pass(1.49, 1.49, 5.39, 100),
    },
}
