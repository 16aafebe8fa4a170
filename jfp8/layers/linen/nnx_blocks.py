"""Blocks of NNX in a Linen module, with Linen layers and parameters: `block_in`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax import nnx

from jfp8.layers.nnx.parts import Parts

Kinds = Mapping[Any, Callable[..., Any]]  # Linen's class for each class of NNX
_INPUT_SIZES = {"in_features", "encoded_features"}


def block_in(module: nn.Module, kind: Callable[..., Any], kinds: Kinds, **options: Any) -> Any:
    """Return a block of NNX for one call of a Linen module, whose submodules are its layers.

    So parameters, states, random keys and paths are Linen's; only the formulas are the block's.
    Flax's ``nnx.bridge.to_linen`` would change initial values, dropout and the names of states.

    Args:
      module: its attributes are the block's options, next to `options`.
      kind: the block's class.
      kinds: Linen's class for each class of layers in the block.
    """
    names = inspect.signature(kind).parameters
    own = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return kind(**{**own, **options, "rngs": LinenParts(module, kinds)})


@dataclass(frozen=True)
class LinenParts(Parts):
    """Make the parts of a block as submodules and parameters of a Linen module."""

    module: nn.Module
    kinds: Kinds

    def layer(self, kind: Any, name: str, *sizes: Any, **options: Any) -> Any:
        made: Any = self.kinds[kind]
        # Linen reads the sizes of inputs from the inputs.
        given = {k: v for k, v in options.items() if k not in _INPUT_SIZES}
        if "state_collection" in made.__dataclass_fields__:
            given["state_collection"] = self.module.state_collection  # pyrefly: ignore
        return made(*sizes[1:], **given, name=name)

    bare = layer

    def parameter(self, name: str, init: Any, *args: Any, draws: bool = True) -> Any:
        return nnx.Param(self.module.param(name, init, *args))

    def dropout(self, rate: float) -> Any:
        return Dropout(self.module, rate) if rate else None


class Dropout(NamedTuple):
    """Dropout with keys of a Linen module."""

    module: nn.Module
    rate: float

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        return nn.Dropout(self.rate, deterministic=deterministic)(x)

    def rngs(self) -> jax.Array:
        return self.module.make_rng("dropout")
