"""`scaled_conv_general_dilated`: convolutions with quantized operands, forward and backward.

A convolution is linear in either operand, so fprop, dgrad and wgrad are convolutions of quantized
arrays, too. With one scale per tensor they are computed as such, unless the kernel covers a single
pixel: then they are matmuls. Finer scales vary along the contracted dimension, and a convolution
does not lay out the terms of a sum contiguously. With finer scales it is therefore computed as a
matmul over patches, with scales along the rows and columns of its matrices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.explained import explained
from jfp8.matmul.planner import allowed_planner
from jfp8.matmul.spec import Implementation, MatmulSpec, scale_products
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.explicit_sharding import specs_of, with_result_like
from jfp8.products.operation import (
    Kind,
    Observed,
    Operand,
    Operation,
    Options,
    State,
    as_operands,
    dtypes_of,
    in_mesh_of_arguments,
)
from jfp8.products.quantized_rhs import values_of
from jfp8.products.vjp import Planned, multiply_quantized
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair
from jfp8.scaling.codes import decode
from jfp8.scaling.history import AmaxState
from jfp8.tracing.compat import vary_like
from jfp8.tracing.device import explicit_mesh


def scaled_conv_general_dilated(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    *,
    recipe: RecipeLike = DelayedScaling(),
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Return ``jax.lax.conv_general_dilated`` with FP8 operands, forward and backward.

    Inputs and results are in high precision, as in `scaled_dot_general`.

    Args:
      lhs, rhs: images and kernels, ``f32 | bf16 | f16`` arrays; see `scaled_dot_general` for an
        `rhs` that is a `ScaledArray`.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count:
        as for ``jax.lax.conv_general_dilated``.
      recipe, state, sink, key, preferred_element_type: see `scaled_dot_general`. Recipes with more
        than one scale for a tensor, or with another ``accumulation`` than ``"f32"``, are
        computed as a matmul over patches.
      implementation: see `scaled_matmul`.

    Returns:
      Array of the same shape as the result of ``jax.lax.conv_general_dilated``.

    Raises:
      TypeError, ValueError: see `scaled_dot_general`; shapes that are invalid for a convolution
        raise the same error as in ``jax.lax.conv_general_dilated``.

    >>> import jax.numpy as jnp, jfp8
    >>> images, kernel = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 4))
    >>> numbers = ("NHWC", "HWIO", "NHWC")
    >>> jfp8.scaled_conv_general_dilated(
    ...     images, kernel, (2, 2), "SAME", dimension_numbers=numbers
    ... ).shape
    (1, 4, 4, 4)
    """
    shape: Any = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    how: Any = (feature_group_count, None, preferred_element_type)
    options = Options(check_recipe(recipe), implementation)
    quantized, _ = convolutions(*shape, *how)
    return quantized(lhs, rhs, options=options, state=State(state, sink, key))[0]


def convolutions(
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    precision: Any,
    preferred_element_type: jax.typing.DTypeLike | None,
    out_sharding: Any = None,
) -> tuple[Callable[..., tuple[jax.Array, Observed]], Callable[..., jax.Array]]:
    """Return `observed_convolution` and ``jax.lax.conv_general_dilated`` with these arguments."""
    window: Any = {
        "window_strides": window_strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
    }
    result = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}

    def quantized(lhs: Any, rhs: Any, **given: Any) -> tuple[jax.Array, Observed]:
        lhs, rhs = as_operands(lhs, rhs)
        return observed_convolution(lhs, rhs, window_of(lhs, rhs, **window), **result, **given)

    def plain(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, precision=precision, **window, **result)

    return quantized, plain


@in_mesh_of_arguments
def observed_convolution(
    lhs: jax.Array,
    rhs: jax.Array | ScaledArray,
    window: Window,
    options: Options,
    state: State,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Any = None,
) -> tuple[jax.Array, Observed]:
    """Compute `scaled_conv_general_dilated` of `as_operands`, and the amaxes of these."""
    result = {"preferred_element_type": preferred_element_type}
    if explicit_mesh() is not None:
        reference = functools.partial(window.convolve, out_sharding=out_sharding)
        function = functools.partial(observed_convolution, window=window, options=options, **result)
        convolve = lambda lhs, rhs, state: function(lhs, rhs, state=state)
        return with_result_like(specs_of(reference, lhs, rhs).y, convolve, lhs, rhs, state)
    dtypes = dtypes_of(lhs, rhs, options, preferred_element_type)
    window.check(lhs, rhs)
    products = options.recipe.resolved()
    one_scale = all(q.block is None and q.one_for_both for q in products.quantizers())
    in_high_precision = not isinstance(rhs, ScaledArray)
    if (
        not one_scale
        or products.matrices
        or options.recipe.accumulation != "f32"
        or (window.is_pointwise(rhs.shape) and in_high_precision)
    ):
        as_dot = lambda patches, kernel, numbers: observed_dot_general(
            patches, kernel, numbers, options, state, preferred_element_type=dtypes[2]
        )
        return _over_patches(lhs, values_of(rhs), window, as_dot)
    if options.implementation == "mosaic_gpu":
        raise NotImplementedError(
            "implementation='mosaic_gpu' supports convolutions with one scale per tensor only if "
            "the kernel is 1x1. Use implementation=None."
        )
    options = options.on_device_of(lhs, rhs)
    spec = ConvSpec((lhs.shape, rhs.shape), dtypes, window, options)
    operation = allowed_planner(options.device, options.implementation).plan(spec)
    return multiply_quantized(Planned(operation, lhs, rhs, options, state))


@dataclass(frozen=True)
class Window:
    """The movement of the kernel over the image, with an entry for each spatial dimension."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    groups: int  # groups of features

    def convolve(self, lhs: jax.Array, rhs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Convolve plain arrays, with f32 sums."""
        return lax.conv_general_dilated(
            lhs,
            rhs,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.dimension_numbers,
            self.groups,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )

    def is_pointwise(self, kernel: Sequence[int]) -> bool:
        """Return True if it is a matmul: the kernel covers one pixel and visits each once."""
        taps = [kernel[d] for d in self.dimension_numbers.rhs_spec[2:]]
        edges = [n for pair in self.padding for n in pair]
        return {self.groups, *taps, *self.strides, *self.lhs_dilation} <= {1} and not any(edges)

    def check(self, lhs: jax.Array, rhs: Operand) -> None:
        """Raise JAX's own error if the shapes do not match."""
        shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
        jax.eval_shape(self.convolve, *shapes)


def window_of(
    lhs: jax.Array,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int = 1,
) -> Window:
    """Return the window that the arguments of `scaled_conv_general_dilated` describe."""
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    ones = (1,) * (lhs.ndim - 2)
    lhs_dilation, rhs_dilation = tuple(lhs_dilation or ones), tuple(rhs_dilation or ones)
    if isinstance(padding, str):
        if lhs_dilation != ones:
            raise ValueError(
                f"padding={padding!r} with lhs_dilation={lhs_dilation}: a transposed convolution "
                "needs explicit padding, a pair of ints for each spatial dimension; or use "
                "jax.lax.conv_transpose's rule."
            )
        dilated = lambda n, d: 0 if n == 0 else 1 + (n - 1) * d
        image = [dilated(lhs.shape[i], d) for i, d in zip(numbers.lhs_spec[2:], lhs_dilation)]
        kernel = [dilated(rhs.shape[i], d) for i, d in zip(numbers.rhs_spec[2:], rhs_dilation)]
        padding = lax.padtype_to_pads(image, kernel, window_strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    dilations = lhs_dilation, rhs_dilation
    return Window(tuple(window_strides), pads, *dilations, numbers, feature_group_count)


@dataclass(frozen=True)
class ConvSpec:
    """The static description of a convolution, from which it is planned."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # lhs and rhs
    dtypes: tuple[np.dtype, np.dtype, np.dtype]  # lhs, rhs and y
    window: Window
    options: Options  # including the device

    def reference(self) -> Convolution:
        """Return the reference operation."""
        return Convolution(self.shapes, self.dtypes, self.window)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Convolution(Operation):
    """A convolution of two operands, each with a single scale."""

    window: Window
    # The dtype in which f8 values are convolved; all are exact, and f32 is fast on CPUs.
    narrow: np.dtype = np.dtype(np.float32)

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = self.window.dimension_numbers
        (n, c, *space), (o, i, *window), (_, f, *_) = numbers
        return {
            "fprop": ((c,), (i, *window)),
            "dgrad": ((f,), (o, *window)),
            "wgrad": ((n, *space), (numbers.out_spec[0], *numbers.out_spec[2:])),
        }[kind]

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        del spec  # sums are in f32
        scales = scale_products(*(_scales(operand) for operand in (first, second)))
        with explained("bf16: there is no FP8 convolution", first, second):
            y = self.of_values(kind, *_values(_data(first), _data(second), self.narrow))
        for scale in scales:
            y = y * scale
        return y.astype(self.dtype_of(kind))

    def of_values(self, kind: Kind, first: jax.Array, second: jax.Array) -> jax.Array:
        """Return the result of one of the three convolutions of plain arrays, in f32."""
        if kind == "fprop":
            return self.window.convolve(first, second)
        convolve: Callable[[jax.Array], jax.Array]
        if kind == "dgrad":
            convolve = lambda lhs: self.window.convolve(lhs, second)
            shape, cotangent = self.shapes[0], first
        else:
            convolve = lambda rhs: self.window.convolve(first, rhs)
            shape, cotangent = self.shapes[1], second
        # An array, not its shape: JAX would sum the gradient over the axes of a ``shard_map``.
        of = vary_like(jnp.zeros(shape, first.dtype), cotangent)
        (gradient,) = jax.linear_transpose(convolve, of)(cotangent.astype(jnp.float32))
        return gradient.astype(jnp.float32)


def _data(operand: Operand) -> jax.Array:
    return operand.data if isinstance(operand, ScaledArray) else operand


def _scales(operand: Operand) -> tuple[jax.Array, ...]:
    return scale_as_f32_pair(operand) if isinstance(operand, ScaledArray) else ()


def _values(
    first: jax.Array, second: jax.Array, narrow: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Return both operands in `narrow` if both are stored in f8, else in f32."""
    if first.dtype.itemsize == second.dtype.itemsize == 1:
        return decode(first).astype(narrow), decode(second).astype(narrow)
    wide = lambda x: decode(x) if x.dtype.itemsize == 1 else x.astype(jnp.float32)
    return wide(first), wide(second)


def _over_patches(
    lhs: jax.Array,
    rhs: jax.Array,
    window: Window,
    dot: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Observed]],
) -> tuple[jax.Array, Observed]:
    """Compute the convolution as one matmul: [n, space, groups, k * c] x [groups, k * c, o]."""
    numbers, groups = window.dimension_numbers, window.groups
    channels_last = lambda spec: (spec[0], *spec[2:], spec[1])
    image = lhs.transpose(channels_last(numbers.lhs_spec))
    kernel = rhs.transpose(*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    patches = _patches(image, kernel.shape[:-2], window)
    n_and_space = patches.shape[:-2]
    taps, c, features = math.prod(kernel.shape[:-2]), kernel.shape[-2], kernel.shape[-1]
    if groups == 1:
        patches = patches.reshape(*n_and_space, taps * c)
        last = patches.ndim - 1
        y, observed = dot(patches, kernel.reshape(taps * c, features), (((last,), (0,)), ((), ())))
    else:
        patches = patches.reshape(*n_and_space, taps, groups, c)
        kernel = kernel.reshape(taps, c, groups, features // groups)
        g = patches.ndim - 2
        y, observed = dot(patches, kernel, (((g - 1, g + 1), (0, 1)), ((g,), (2,))))
        y = jnp.moveaxis(y, 0, -2).reshape(*n_and_space, features)
    return y.transpose(np.argsort(channels_last(numbers.out_spec))), observed


def _patches(image: jax.Array, kernel: Sequence[int], window: Window) -> jax.Array:
    """Gather the inputs of each output pixel: [n, *space, c] -> [n, *out space, taps, c]."""
    inner = [(low, high, d - 1) for (low, high), d in zip(window.padding, window.lhs_dilation)]
    image = lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, window.rhs_dilation)]
    outs = [max(0, (n - e) // s + 1) for n, e, s in zip(image.shape[1:-1], extents, window.strides)]
    taps = []
    for tap in itertools.product(*(range(k) for k in kernel)):
        start = [t * d for t, d in zip(tap, window.rhs_dilation)]
        stop = [b + (o - 1) * s + 1 for b, o, s in zip(start, outs, window.strides)]
        ends = (image.shape[0], *stop, image.shape[-1])
        taps.append(lax.slice(image, (0, *start, 0), ends, (1, *window.strides, 1)))
    return jnp.stack(taps, axis=-2)
