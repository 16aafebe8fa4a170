"""Operands of attention, quantized from where a projection wrote them.

The kernels of attention take each head both straight and transposed. A kernel that quantizes writes
both, from one read of the projection; XLA would move heads and tokens before it does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.partitioning import divided
from jfp8.matmul.spec import HARDWARE_FORMATS
from jfp8.scaling.casts import cast
from jfp8.scaling.formats import Format
from jfp8.tracing.compat import kernels_are_interpreted, same_varying_axes

Pair: TypeAlias = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Whole:
    """What some heads are a part of: in each group, as many as they are from `first` on.

    Attributes:
      array: ``[batch, tokens, groups, heads of a group, depth]``.
      first: the first of them.
    """

    array: jax.Array
    first: int = field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """Heads, and what they are a part of. What is no attention of jfp8 takes the array.

    Attributes:
      array: ``[batch, tokens, heads, depth]``, the heads of one group after another; gradients are
        its.
      whole: gets no gradient.
    """

    array: jax.Array
    whole: Whole

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype


def split_heads(x: Any) -> tuple[Any, Whole | None]:
    """The heads alone, and what they are a part of, if that is known."""
    return (x.array, lax.stop_gradient(x.whole)) if isinstance(x, Heads) else (x, None)


def has_kernel(x: jax.Array, fmt: Format) -> bool:
    """Whether the kernel takes heads ``x[..., tokens, depth]``."""
    *_, tokens, depth = x.shape
    return tokens % 128 == 0 and depth in (64, 128, 256) and fmt in HARDWARE_FORMATS


# A kernel takes a while to compile, so it is compiled once for all layers of the same shapes.
@partial(jax.jit, static_argnums=2)
def cast_heads(x: jax.Array, inverse: jax.Array, fmt: Format, whole: Whole | None) -> Pair:
    """``cast(x * inverse[..., None], fmt)``, straight and transposed; `has_kernel` must hold.

    The kernel runs where the program is compiled for CUDA.

    Args:
      x: ``[batch, groups, heads of a group, tokens, depth]``; the third may be missing, for 1.
      inverse: ``f32[batch, groups, heads of a group, tokens]``, likewise.
      whole: what `x` is a part of; None: nothing else.
    """
    each = x.shape[:-2]

    def by_kernel(x: jax.Array, inverse: jax.Array, whole: Whole | None) -> Pair:
        from jfp8.kernels.hopper.quantize_heads import quantize_heads

        if whole is None:
            x = x.reshape(*each[:2], -1, *x.shape[-2:])
            whole = Whole(x.transpose(0, 3, 1, 2, 4))
        kernel = partial(quantize_heads, first=whole.first, fmt=fmt)
        rule = "b T g R H, b g N T -> b g N T H, b g N H T"
        quantize = divided(f"quantize_heads, {fmt}, {whole.first}", kernel, rule)
        inverse = inverse.reshape(*each[:2], -1, inverse.shape[-1])
        q, q_t = same_varying_axes((quantize(whole.array, inverse), x))[0]
        return q.reshape(*each, *q.shape[-2:]), q_t.reshape(*each, *q_t.shape[-2:])

    def in_steps(x: jax.Array, inverse: jax.Array, whole: Whole | None) -> Pair:
        del whole
        q = cast(x.astype(jnp.float32) * inverse[..., None], fmt)
        return q, q.swapaxes(-1, -2)

    if kernels_are_interpreted():
        return by_kernel(x, inverse, whole)
    return lax.platform_dependent(x, inverse, whole, cuda=by_kernel, default=in_steps)
