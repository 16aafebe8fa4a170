"""How one operand becomes f8: `quantize`, and the quantizers that recipes are made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8 import printing
from jfp8.arrays import ScaledArray, apply_scale, check_scale_shape
from jfp8.formats import (
    E4M3FN,
    E8M0FNU,
    ROUNDINGS,
    Format,
    Rounding,
    check_cast_arguments,
    codes_to_format,
    decode,
    encode,
    straight_through,
)
from jfp8.random_bits import hash_bits
from jfp8.scaling import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    AmaxState,
    Block,
    Granularity,
    PerAxis,
    PerTensor,
    ScaleRounding,
    amax,
    check_scale_rounding,
    history_amax,
    ragged_block,
    reciprocal,
    reciprocal_factors,
    scale_from_amax,
)

__all__ = [
    "Blockwise",
    "Context",
    "Current",
    "Delayed",
    "Quantizer",
    "Rowwise",
    "TwoLevel",
    "Unit",
    "quantize",
]


def quantize(
    x: jax.typing.ArrayLike,
    fmt: Format = E4M3FN,
    *,
    granularity: Granularity = PerTensor(),
    scale: jax.typing.ArrayLike | None = None,
    scale_rounding: ScaleRounding = None,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
) -> ScaledArray:
    """``data = cast(x * (1 / scale), fmt)`` with ``scale = amax(x) / fmt.max`` unless it is given.

    Elements beyond ``scale * fmt.max`` saturate. NaN and Inf do not: both become NaN in `data`, so
    that neither disappears behind the cast. In a `Block` they make the scale NaN, and with it the
    whole block; likewise whatever shares a computed scale with them in E2M1FN, which has no NaN
    (with a given scale they do saturate there). The gradient is straight-through; see `dequantize`
    for its precision. (E3M4, stored in uint8, has none.)

    Args:
      x: ``f32 | bf16 | f16`` array of any shape.
      fmt: format of the data.
      granularity: which elements share a scale: ``PerTensor()``, ``PerAxis(axis)`` or
        ``Block(shape)``.
      scale: use this scale instead (a "static" or "delayed" one): a positive number, or an f32 or
        e8m0 array that is 0-d or has ``x.ndim`` dimensions dividing those of `x`.
      scale_rounding: see `scaling.scale_from_amax`; ``"power_of_two"`` scales multiply exactly.
      rounding: see `cast`.
      key: see `cast`.

    Returns:
      `ScaledArray` of the shape of `x`. A zero, infinite or NaN amax gives a scale of 1.

    Raises:
      TypeError: `x` is not of a real floating dtype of at most 32 bits; `fmt` is no `Format` with a
        sign; `granularity` or `scale` is of the wrong kind.
      ValueError: unknown `rounding` or `scale_rounding`; a granularity or scale that does not fit
        the shape of `x` (blocks may be cut short at the end of a dimension, given scales not);
        both `scale` and `scale_rounding`; stochastic rounding without `key`.

    >>> import jax.numpy as jnp, jfp8
    >>> q = jfp8.quantize(jnp.array([[1.0, -4.0], [0.5, 0.25]]), granularity=jfp8.PerAxis(0))
    >>> q.scale.shape, q.dequantize()
    ((2, 1), Array([[ 1.  , -4.  ],
           [ 0.5 ,  0.25]], dtype=float32))
    """
    x, bits = check_cast_arguments(x, fmt, rounding, key)
    if not fmt.signed:
        raise TypeError(f"{fmt.name} has no sign and no zero: it holds scales, not data.")
    if scale is not None:
        if scale_rounding is not None:
            raise ValueError(
                f"scale_rounding={scale_rounding!r} rounds the scale that quantize computes, but "
                "scale= was given and is used as it is. Pass one of the two."
            )
        scale = jnp.asarray(scale)
        if scale.dtype != E8M0FNU.dtype:
            if not jnp.issubdtype(scale.dtype, jnp.floating):
                raise TypeError(f"scale must be floating, got dtype {scale.dtype}.")
            scale = scale.astype(jnp.float32)
    return _quantize(x, scale, bits, fmt, granularity, scale_rounding, rounding)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _quantize(x, scale, bits, fmt, granularity, scale_rounding, rounding) -> ScaledArray:
    source = lax.stop_gradient(x)
    block = inverse = None
    if isinstance(granularity, Block) and scale is None:
        scale, block, inverse = block_scale(source, fmt, granularity, scale_rounding)
    elif scale is None:
        scale = scale_from_amax(amax(source, granularity), fmt, scale_rounding=scale_rounding)
    scale = lax.stop_gradient(scale)
    q = quantize_with_scale(source, scale, fmt, rounding, bits, block, inverse)
    return ScaledArray(straight_through(x, q.data), q.scale, q.block)


def block_scale(
    x: jax.Array, fmt: Format, granularity: Block, scale_rounding: ScaleRounding = None
) -> tuple[jax.Array, tuple[int, ...] | None, jax.Array]:
    """Scale of every block by its own amax, `ScaledArray.block`, and the reciprocals of the scales.

    A block with a NaN or an Inf in it becomes NaN as a whole: there is no scale that fits it.
    """
    scale = scale_from_amax(amax(x, granularity), fmt, scale_rounding=scale_rounding, poison=True)
    if scale.dtype == E8M0FNU.dtype:
        # No amax has a code above 253, so that the reciprocal is a normal f32.
        code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
        inverse = lax.bitcast_convert_type((np.uint32(254) - code) << 23, jnp.float32)
        inverse = jnp.where(code == 255, jnp.nan, inverse)
    else:
        inverse = reciprocal(scale)
    return scale, ragged_block(granularity, x.shape), inverse


def quantize_with_scale(
    x: jax.Array,
    scale: jax.Array | ScaledArray,
    fmt: Format,
    rounding: str = "nearest_even",
    bits: jax.Array | None = None,
    block: tuple[int, ...] | None = None,
    inverse: jax.Array | None = None,
) -> ScaledArray:
    """`quantize` with a scale at hand, unchecked and without a gradient.

    A multiplication by the explicit reciprocal, since XLA turns a division by a broadcast scale
    into one anyway, on some backends. Whoever has it at hand passes it as `inverse`; non-finite
    blocks are NaN in it.
    """
    check_scale_shape(ScaledArray(x, scale, block))
    values = x.astype(jnp.float32)
    if inverse is not None:
        values = apply_scale(values, inverse, block)
    else:
        assert not isinstance(scale, ScaledArray)
        for factor in reciprocal_factors(scale):
            values = apply_scale(values, factor, block)
    if not isinstance(scale, ScaledArray) and scale.dtype == E8M0FNU.dtype:
        values = _with_subnormals(values, x, scale, block)
    codes = encode(values, fmt, rounding, bits)
    if fmt.has_nan and inverse is None:
        # The cast saturates Inf; asking x itself tells it from a finite value that overflows.
        codes = jnp.where(jnp.isfinite(x), codes, np.uint8(fmt.nan_code))
    return ScaledArray(codes_to_format(codes, fmt), scale, block)


def _with_subnormals(
    values: jax.Array, x: jax.Array, scale: jax.Array, block: tuple[int, ...] | None
) -> jax.Array:
    """`values` ``= x * 2^(127-c)``, where subnormal elements of `x` are taken from their integers.

    The pattern ``k`` of a subnormal is its value in units of 2^-149, so that it becomes
    ``k * 2^(-22-c)``. XLA:CPU's own product would be zero. (Only small codes matter: with more than
    ``c = 40`` even the largest subnormal is below a quarter of the smallest value of any format.)
    """
    if x.dtype.itemsize == 1 or x.dtype == jnp.float16:
        return values  # holds no subnormals of f32
    pattern = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = pattern & np.uint32(0x7FFFFFFF)
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    factor = lax.bitcast_convert_type(
        (np.uint32(127 - 22) - jnp.minimum(code, np.uint32(40))) << 23, jnp.float32
    )
    factor = jnp.where(code == 255, jnp.nan, factor)
    k = jnp.minimum(magnitude, np.uint32(1 << 23)).astype(jnp.int32).astype(jnp.float32)
    from_integer = apply_scale(jnp.where(pattern == magnitude, k, -k), factor, block)
    return jnp.where(magnitude < np.uint32(1 << 23), from_integer, values)


@dataclass(frozen=True)
class Context:
    """What a quantizer is told about a tensor, beside its values.

    Attributes:
      contracting: the dimensions that the product sums over. If the quantizer has a
        `Quantizer.block` there is one, among the last two dimensions of the tensor; the other of
        them is the free one, and before them there may be a batch dimension.
      amax: f32[], the largest magnitude of the tensor.
      state: the amax history of the tensor, if its recipe keeps one and it is at hand.
      seed: uint32[2] for `random_bits.hash_bits`, different for every tensor and step; only for
        quantizers that are `Quantizer.stochastic`.
    """

    contracting: tuple[int, ...]
    amax: jax.Array
    state: AmaxState | None = None
    seed: jax.Array | None = None


@dataclass(frozen=True, repr=False)
class Quantizer:
    """One operand's way into f8: a frozen dataclass, equal to another if it quantizes alike.

    To write one, derive from this class, decorate with ``@dataclass(frozen=True)``, and override
    ``__call__`` (with the help of `data_for`); override what else differs from the defaults below.
    It is called while JAX traces, and without gradients: those go straight through.

    Attributes:
      fmt: format of the data.
      rounding: see `cast`.
    """

    fmt: Format
    rounding: Rounding = field(default="nearest_even", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.fmt, Format):
            raise TypeError(f"fmt must be a jfp8.Format such as jfp8.E4M3FN, got {self.fmt!r}.")
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"rounding={self.rounding!r} is unknown. Allowed: {', '.join(ROUNDINGS)}."
            )

    def __repr__(self) -> str:
        """The call that makes it, without the fields that have their default."""
        return printing.changes(self)

    @property
    def block(self) -> tuple[int, int] | None:
        """Elements that share a scale (along the contraction, along the free dimension).

        None if no scale varies along the contraction.
        """
        return None

    @property
    def one_for_both(self) -> bool:
        """The result does not depend on `Context.contracting`.

        One quantization then serves both products that a tensor takes part in.
        """
        return False

    @property
    def powers_of_two(self) -> bool:
        """All of its scales are powers of two."""
        return False

    @property
    def history_len(self) -> int:
        """Length of the amax history that it wants kept; 0 for none."""
        return 0

    @property
    def stochastic(self) -> bool:
        """Whether it needs `Context.seed`."""
        return self.rounding == "stochastic"

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
        """``ScaledArray(cast(x / scale), scale)``, rounded as `rounding` says.

        Args:
          x: ``f32 | bf16 | f16`` array.
          scale: f32 or e8m0 array, or a `ScaledArray` of two levels.
          context: what ``__call__`` was given.
          block: see `ScaledArray`.
          inverse: f32 array, the reciprocals of `scale`, where they are at hand.
        """
        bits = None
        if self.stochastic:
            assert context.seed is not None  # whoever asks for stochastic rounding brings one
            bits = hash_bits(context.seed, x.shape)
        return quantize_with_scale(x, scale, self.fmt, self.rounding, bits, block, inverse)


@dataclass(frozen=True, repr=False)
class Current(Quantizer):
    """Per-tensor scale from the data at hand ("dynamic", "just-in-time").

    Attributes:
      scale_rounding: see `scaling.scale_from_amax`.
    """

    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale_rounding(self.scale_rounding)

    @property
    def one_for_both(self) -> bool:
        return True

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        scale = scale_from_amax(context.amax, self.fmt, scale_rounding=self.scale_rounding)
        return self.data_for(x, scale, context)


@dataclass(frozen=True, repr=False)
class Delayed(Quantizer):
    """Per-tensor scale from the amaxes of earlier steps.

    ``scale = max(history) / fmt.max * 2^margin``, or with ``algo="most_recent"`` from the newest
    entry. Before the history has an entry it is the current amax (or the maximum of the step so
    far, if larger), so that the first step neither saturates nor flushes.

    Attributes:
      margin: powers of two of headroom.
      algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
      scale_rounding: see `scaling.scale_from_amax`.
      length: of the history, in steps.
    """

    margin: int = 0
    algo: str = "max"
    scale_rounding: ScaleRounding = None
    length: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_has_nan(self)
        check_scale_rounding(self.scale_rounding)
        if self.algo not in ("max", "most_recent"):
            raise ValueError(f"Delayed(algo={self.algo!r}): allowed are 'max', 'most_recent'.")
        for name, least in (("margin", 0), ("length", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Delayed({name}={value!r}): must be an int of at least {least}.")

    @property
    def one_for_both(self) -> bool:
        return True

    @property
    def history_len(self) -> int:
        return self.length

    def expected(self, state: AmaxState) -> jax.Array:
        """The amax that the history in `state` predicts, f32[]; 0 if it is empty."""
        return history_amax(state["amax_history"], self.algo)

    def scale(self, observed: jax.Array, state: AmaxState | None) -> jax.Array:
        """The scale, f32[], that `state` predicts, or else that of the amax `observed`."""
        if state is not None:
            expected = self.expected(state)
            observed = jnp.where(expected > 0, expected, jnp.maximum(observed, state["amax"]))
        return scale_from_amax(
            observed, self.fmt, margin=self.margin, scale_rounding=self.scale_rounding
        )

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        return self.data_for(x, self.scale(context.amax, context.state), context)


@dataclass(frozen=True, repr=False)
class Unit(Quantizer):
    """No scaling: the scale is 1, and what does not fit is lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_has_nan(self)

    @property
    def one_for_both(self) -> bool:
        return True

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        return self.data_for(x, jnp.ones((), jnp.float32), context)


@dataclass(frozen=True, repr=False)
class Rowwise(Quantizer):
    """One scale for every row that the product sums over ("per axis", "axiswise").

    The scales vary along all dimensions but the contracting ones, and leave the sum.

    Attributes:
      scale_rounding: see `scaling.scale_from_amax`.
    """

    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale_rounding(self.scale_rounding)

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        kept = tuple(d for d in range(x.ndim) if d not in context.contracting)
        rows = amax(x, PerAxis(kept))
        scale = scale_from_amax(rows, self.fmt, scale_rounding=self.scale_rounding)
        return self.data_for(x, scale, context)


@dataclass(frozen=True, repr=False)
class _InBlocks(Quantizer):
    """What quantizers in blocks share.

    Attributes:
      block_size: elements of a block along the contraction, and along the free dimension. If both
        are equal, either direction of contraction sees the same numbers.
    """

    block_size: tuple[int, int] = (32, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.block_size
        if not (
            isinstance(size, tuple)
            and len(size) == 2
            and all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in size)
        ):
            raise ValueError(
                "block_size must be two positive ints, the size along the contraction and the size "
                f"along the free dimension, like (32, 1) or (128, 128); got {size!r}."
            )

    @property
    def block(self) -> tuple[int, int]:
        return self.block_size

    @property
    def one_for_both(self) -> bool:
        return self.block_size[0] == self.block_size[1]

    def granularity(self, ndim: int, context: Context) -> Block:
        """The blocks of an array of `ndim` dimensions."""
        (contracting,) = context.contracting
        return Block(
            tuple(self.block_size[0 if d == contracting else 1] for d in (ndim - 2, ndim - 1))
        )


@dataclass(frozen=True, repr=False)
class Blockwise(_InBlocks):
    """One scale for every block of elements, from the data at hand.

    Attributes:
      block_size: elements of a block along the contraction, and along the free dimension. If both
        are equal, either direction of contraction sees the same numbers.
      scale_rounding: see `scaling.scale_from_amax`; None gives f32 scales.
    """

    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale_rounding(self.scale_rounding)

    @property
    def powers_of_two(self) -> bool:
        return self.scale_rounding is not None

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        granularity = self.granularity(x.ndim, context)
        scale, block, inverse = block_scale(x, self.fmt, granularity, self.scale_rounding)
        return self.data_for(x, scale, context, block=block, inverse=inverse)


@dataclass(frozen=True, repr=False)
class TwoLevel(_InBlocks):
    """A narrow scale for every block under one f32 scale for the tensor (NVFP4). ::

        S = scale_fmt.max * fmt.max / amax        the tensor's, multiplying
        s = cast(amax_block / fmt.max * S, scale_fmt)
        q = cast(x / (s / S), fmt)                by the rounded s
        x ~= q * s / S

    Attributes:
      block_size: as for `Blockwise`.
      scale_fmt: format of ``s``.

    References:
      arXiv 2509.25149 appendix B; Transformer Engine, ``common/cast/nvfp4``.
    """

    scale_fmt: Format = E4M3FN

    def __post_init__(self) -> None:
        super().__post_init__()
        fmt = self.scale_fmt
        if not isinstance(fmt, Format) or not fmt.signed or not fmt.has_nan:
            raise ValueError(
                f"scale_fmt={fmt!r}: must be a format with a sign and a NaN, for blocks that hold "
                "one, such as jfp8.E4M3FN."
            )

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        granularity = self.granularity(x.ndim, context)
        scale, inverse = two_level_scale(amax(x, granularity), self.fmt, self.scale_fmt)
        block = ragged_block(granularity, x.shape)
        return self.data_for(x, scale, context, block=block, inverse=inverse)


def two_level_scale(
    block_amax: jax.Array, fmt: Format, scale_fmt: Format
) -> tuple[ScaledArray, jax.Array]:
    """The scales of `TwoLevel`, `scale_fmt` under one f32, and what to multiply `x` by.

    A non-finite amax makes its block's scale NaN, and the tensor's scale is that of the others.
    Blocks so far below the tensor's amax that their scale is zero become zero.
    """
    finite = jnp.isfinite(block_amax)
    largest = jnp.max(jnp.where(finite, block_amax, 0.0), initial=0.0)
    numerator = np.float32(scale_fmt.max * fmt.max)
    encode_scale = jnp.where(largest > 0, numerator / jnp.where(largest > 0, largest, 1.0), 1.0)
    encode_scale = jnp.clip(encode_scale, SMALLEST_SCALE, LARGEST_SCALE)
    # XLA would multiply by the reciprocal of a divisor that is constant or the same for all blocks,
    # and turn 1 / (s / S) into S / s: fewer roundings than the rule has, but not everywhere. What
    # is never negative might be so for all that XLA knows, and then the divisor would be another.
    s = block_amax / jnp.where(block_amax < 0, 1.0, np.float32(fmt.max)) * encode_scale
    narrow = codes_to_format(encode(jnp.where(finite, s, jnp.nan), scale_fmt), scale_fmt)
    s = decode(narrow)
    quotient = s / jnp.where(s < 0, 1.0, encode_scale)
    inverse = reciprocal(jnp.where(quotient < 0, 1.0, quotient))
    inverse = jnp.where(jnp.isinf(inverse), np.finfo(np.float32).max, inverse)
    return ScaledArray(narrow, reciprocal(encode_scale)), inverse


def check_has_nan(quantizer: Quantizer) -> None:
    """Raise unless the format has a NaN. A scale that does not see the data cannot stand in."""
    if not quantizer.fmt.has_nan:
        raise ValueError(
            f"{type(quantizer).__name__}({quantizer.fmt.name}): the format has no NaN, and the "
            "scale does not depend on the data at hand, so that a NaN or Inf would vanish. Use "
            "Current, Rowwise, Blockwise or TwoLevel."
        )
