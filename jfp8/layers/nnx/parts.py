"""Make the layers and parameters in a block: `Parts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flax import nnx
from flax.typing import Initializer

T = TypeVar("T")


class Parts:
    """Make the parts of an NNX block, with `rngs`.

    A Linen block is the same class with parts of Linen, see `linen.nnx_blocks.block_in`,
    so each part has a name.
    """

    def __init__(self, rngs: Any) -> None:
        self.rngs = rngs

    @staticmethod
    def of(rngs: Any) -> Parts:
        """Return the parts for the argument `rngs` of a block's constructor."""
        return rngs if isinstance(rngs, Parts) else Parts(rngs)

    def layer(self, kind: Callable[..., T], name: str, *sizes: Any, **options: Any) -> T:
        """Return a layer or block. `sizes` begin with the size of its input, if it has any."""
        return kind(*sizes, **options, rngs=self.rngs)

    def bare(self, kind: Callable[..., T], name: str, **options: Any) -> T:
        """Return a layer without parameters."""
        return kind(**options)

    def parameter(self, name: str, init: Initializer, *args: Any, draws: bool = True) -> Any:
        """Return a parameter of the block itself; with `draws` it takes a key."""
        key: Any = self.rngs.params() if draws else None
        return nnx.Param(init(key, *args))

    def dropout(self, rate: float) -> Any:
        """Return dropout as an attribute; None without dropout, which needs no stream."""
        return nnx.data(nnx.Dropout(rate, rngs=self.rngs) if rate else None)
