"""The calls of FP8 matmuls, for the modules of Linen and NNX alike: JAX's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jfp8.matmul.bias import plus_bias
from jfp8.products.conv import convolutions
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.ragged.dot import observed_ragged_dot
from jfp8.products.ragged.expert_rows import ExpertRows
from jfp8.products.ragged.experts import observed_expert_dot, plain_expert_dot
from jfp8.products.shared_input import SharedInput
from jfp8.scaling.arrays import ScaledArray


class Multiplies:
    """A base of modules that compute a matmul: `_multiply` is `multiply_at` for the module."""

    _multiply: Callable[..., jax.Array]


class DotGeneralCall(Multiplies):
    """The call of a module in place of ``jax.lax.dot_general``."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array | ScaledArray,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
        bias: jax.Array | None = None,
        shared_input: SharedInput | None = None,
    ) -> jax.Array:
        """Return ``jax.lax.dot_general`` in FP8; see `jfp8.scaled_dot_general`.

        Args:
          lhs, rhs: ``f32 | bf16 | f16`` arrays; `rhs` may be a `ScaledArray`.
          dimension_numbers: see ``jax.lax.dot_general``.
          precision: the matmul's if FP8 is disabled (see `jfp8.autocast`).
          preferred_element_type: dtype of the result.
          out_sharding: sharding of the result, for meshes with explicit axes.
          bias: ``[n]``, added to each row of the result.
          shared_input: for layers with the same `lhs`; see `SharedInput`.
        """
        how: dict[str, Any] = {
            "dimension_numbers": dimension_numbers,
            "preferred_element_type": preferred_element_type,
            "out_sharding": out_sharding,
        }
        quantized = partial(observed_dot_general, **how, bias=bias)

        def plain(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return plus_bias(lax.dot_general(lhs, rhs, **how, precision=precision), bias)

        return self._multiply(quantized, plain, lhs, rhs, shared=shared_input)


class ConvCall(Multiplies):
    """The call of a module in place of ``jax.lax.conv_general_dilated``."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array | ScaledArray,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Return ``jax.lax.conv_general_dilated`` in FP8; see `jfp8.scaled_conv_general_dilated`.

        Args:
          lhs, rhs: ``f32 | bf16 | f16`` arrays: images and kernels; `rhs` may be a `ScaledArray`.
          precision: the convolution's if FP8 is disabled (see `jfp8.autocast`).
          out_sharding: sharding of the result, for meshes with explicit axes.
        """
        window: Any = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
        how: Any = (feature_group_count, precision, preferred_element_type, out_sharding)
        return self._multiply(*convolutions(*window, *how), lhs, rhs, "conv")


class RaggedDotCall(Multiplies):
    """The call of a module in place of ``jax.lax.ragged_dot``."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array | ScaledArray,
        group_sizes: jax.Array | ExpertRows,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Return ``jax.lax.ragged_dot`` in FP8; see `jfp8.products.ragged.dot.scaled_ragged_dot`.

        Args:
          lhs: ``f32 | bf16 | f16`` of shape ``[m, k]``.
          rhs: the same of shape ``[g, k, n]``, or a `ScaledArray`.
          group_sizes: integers of shape ``[g]``; or the rows of experts on many devices, see
            `observed_expert_dot`.
          precision: the matmul's where FP8 is disabled (see `jfp8.autocast`).
          preferred_element_type: dtype of the result.
        """
        how: dict[str, Any] = {"preferred_element_type": preferred_element_type}
        if isinstance(group_sizes, ExpertRows):
            how["rows"] = group_sizes
            quantized, plain = partial(observed_expert_dot, **how), partial(plain_expert_dot, **how)
        else:
            how["group_sizes"] = group_sizes
            quantized = partial(observed_ragged_dot, **how)
            plain = partial(lax.ragged_dot, precision=precision, **how)
        return self._multiply(quantized, plain, lhs, rhs, "moe")
