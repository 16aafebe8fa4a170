"""`Quantizer`: how one operand of a matmul is quantized. Recipes are made of them.

This file also has those with one scale for a tensor: from its data, from its history, or 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jfp8.scaling import printing
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.casts import ROUNDINGS, Rounding
from jfp8.scaling.formats import Format, as_format
from jfp8.scaling.history import AmaxState, history_amax, running_amax
from jfp8.scaling.random_bits import hash_bits
from jfp8.scaling.scales import (
    ScaleRounding,
    check_scale_rounding,
    quantize_with_scale,
    scale_from_amax,
)

Along = Literal["contracting", "free", "batch"]
EVERYWHERE: frozenset[Along] = frozenset(("contracting", "free", "batch"))


@dataclass(frozen=True)
class Context:
    """Information for a quantizer about a tensor, besides its values.

    Attributes:
      contracting: the dimensions that the matmul sums over. If the quantizer has a
        `Quantizer.block`, there is only one, among the last two dimensions of the tensor; the other
        of the two is the free one, and a batch dimension may come before them.
      amax: f32[], the amax of the tensor.
      state: the amax history of the tensor, if its recipe keeps one and it was passed.
      seed: uint32[2] for `random_bits.hash_bits`, different for every tensor and step; only for
        quantizers that are `Quantizer.stochastic`.
    """

    contracting: tuple[int, ...]
    amax: jax.Array
    state: AmaxState | None = None
    seed: jax.Array | None = None


@dataclass(frozen=True, repr=False)
class Quantizer:
    """Base class: how one operand is quantized. A frozen dataclass; equal ones quantize alike.

    To write one, derive from this class, decorate with ``@dataclass(frozen=True)``, and override
    ``__call__`` (with the help of `data_for`), and whatever else differs from the defaults below.
    It is called while JAX traces, and is not differentiated: gradients are straight-through.

    Attributes:
      fmt: format of the data.
      rounding: see `cast`.
    """

    fmt: Format
    rounding: Rounding = field(default="nearest_even", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.fmt, Format):
            object.__setattr__(self, "fmt", as_format(self.fmt))
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"rounding={self.rounding!r} is unknown. Allowed: {', '.join(ROUNDINGS)}."
            )

    __repr__ = printing.changes

    @property
    def block(self) -> tuple[int, int] | None:
        """Elements that share a scale (along the contraction, along the free dimension).

        None if no scale varies along the contraction.
        """
        return None

    @property
    def one_for_both(self) -> bool:
        """Return whether the result is the same for every `Context.contracting`.

        Then the tensor is quantized once for both matmuls that it takes part in.
        """
        return False

    @property
    def spans_rows(self) -> bool:
        """Return whether each row along the contraction has one scale."""
        return self.block is None and not self.one_for_both

    @property
    def powers_of_two(self) -> bool:
        """Return whether all scales are powers of two."""
        return False

    @property
    def history_len(self) -> int:
        """Length of the amax history that it needs; 0 for none."""
        return 0

    @property
    def stochastic(self) -> bool:
        """Return whether quantizing needs `Context.seed`."""
        return self.rounding == "stochastic"

    def scale_shared_along(self, history: bool) -> frozenset[Along]:
        """Return the dimensions along which elements share a scale that any one of them can change.

        Some of ``"contracting"`` (the matmul sums over it), ``"free"`` (the matmul keeps it) and
        ``"batch"`` (both operands have it); all three, unless a quantizer overrides this.
        `Recipe.is_causal` depends on it.

        Args:
          history: whether there is an amax history with an entry.
        """
        del history
        return EVERYWHERE

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        """Quantize `x`; the result has the shape of `x`."""
        raise NotImplementedError(f"{type(self).__name__} does not override __call__.")

    def data_for(
        self,
        x: jax.Array,
        scale: jax.Array | ScaledArray,
        context: Context,
        *,
        block: tuple[int, ...] | None = None,
        inverse: jax.Array | None = None,
    ) -> ScaledArray:
        """Return ``ScaledArray(cast(x / scale), scale)``, rounded as `rounding` says.

        Args:
          x: ``f32 | bf16 | f16`` array.
          scale: f32 or e8m0 array, or a `ScaledArray` of two levels.
          context: the one that ``__call__`` got.
          block: see `ScaledArray`.
          inverse: f32 array, the reciprocals of `scale`, if they are known.
        """
        bits = None
        if self.stochastic:
            assert context.seed is not None  # stochastic quantizers always get one
            bits = hash_bits(context.seed, x.shape)
        return quantize_with_scale(x, scale, self.fmt, self.rounding, bits, block, inverse)


# Up to a hundred operations, which are traced and lowered once for all arrays of a shape.
@partial(jax.jit, static_argnums=(0, 1))
def quantized(
    quantizer: Quantizer, contracting: tuple[int, ...], x: jax.Array, *known: Any
) -> ScaledArray:
    """Return ``quantizer(x, Context(contracting, *known))``."""
    return quantizer(x, Context(contracting, *known))


@dataclass(frozen=True, repr=False)
class ScalesFromData(Quantizer):
    """A `Quantizer` whose scales are computed from the data by `scaling.scale_from_amax`."""

    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale_rounding(self.scale_rounding)


@dataclass(frozen=True, repr=False)
class _NotFromData(Quantizer):
    """A `Quantizer` with one scale that is not computed from the data, nor becomes NaN by it."""

    one_for_both = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fmt.has_nan:
            raise ValueError(
                f"{type(self).__name__}({self.fmt.name}): the format has no NaN, and the scale is "
                "not computed from the data, so a NaN or Inf would vanish. Use Current, Rowwise, "
                "Blockwise or TwoLevel."
            )


@dataclass(frozen=True, repr=False)
class Current(ScalesFromData):
    """Per-tensor scale from the data itself: ``amax(x) / fmt.max`` ("dynamic", "just-in-time").

    Attributes:
      scale_rounding: see `scaling.scale_from_amax`.
    """

    one_for_both = True

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        scale = scale_from_amax(context.amax, self.fmt, scale_rounding=self.scale_rounding)
        return self.data_for(x, scale, context)


@dataclass(frozen=True, repr=False)
class Delayed(_NotFromData):
    """Per-tensor scale from the amaxes of earlier steps.

    ``scale = max(history) / fmt.max * 2^margin``, or with ``algo="most_recent"`` from the newest
    entry. While the history is empty, the current amax is used, so that the first step neither
    saturates nor flushes. The largest amax of the current step so far is used instead if it is
    larger.

    Attributes:
      margin: powers of two of headroom.
      algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
      scale_rounding: see `scaling.scale_from_amax`.
      length: length of the history, in steps.
    """

    margin: int = 0
    algo: str = "max"
    scale_rounding: ScaleRounding = None
    length: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding is not None:
            check_scale_rounding(self.scale_rounding)
        if self.algo not in ("max", "most_recent"):
            raise ValueError(f"Delayed(algo={self.algo!r}): allowed are 'max', 'most_recent'.")
        for name, least in (("margin", 0), ("length", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Delayed({name}={value!r}): must be an int of at least {least}.")

    @property
    def history_len(self) -> int:
        return self.length

    def expected(self, state: AmaxState) -> jax.Array:
        """Return the amax that the history in `state` predicts, f32[]; 0 if no step has ended."""
        return history_amax(state["amax_history"], self.algo)

    @partial(jax.jit, static_argnums=0)
    def scale(self, observed: jax.Array, state: AmaxState | None) -> jax.Array:
        """Return the scale, f32[], from the history in `state` or the amax `observed`."""
        if state is not None:
            expected = self.expected(state)
            observed = jnp.where(expected > 0, expected, observed)
            observed = jnp.maximum(observed, running_amax(state))
        return scale_from_amax(
            observed, self.fmt, margin=self.margin, scale_rounding=self.scale_rounding
        )

    def scale_shared_along(self, history: bool) -> frozenset[Along]:
        return frozenset() if history else EVERYWHERE

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        return self.data_for(x, self.scale(context.amax, context.state), context)


@dataclass(frozen=True, repr=False)
class Unit(_NotFromData):
    """No scaling: the scale is 1; values outside the format's range saturate or are flushed."""

    def scale_shared_along(self, history: bool) -> frozenset[Along]:
        del history
        return frozenset()

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        return self.data_for(x, jnp.ones((), jnp.float32), context)
