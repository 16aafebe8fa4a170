"""Looking into compiled programs."""

from jfp8.debug.collective_bytes import (
    Collective,
    CollectiveBytes,
    assert_collectives,
    collective_bytes,
)

__all__ = ["Collective", "CollectiveBytes", "assert_collectives", "collective_bytes"]
