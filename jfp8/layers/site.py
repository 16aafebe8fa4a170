"""The matmul of a layer, in Linen or NNX: FP8 or not, with its state, and noted for reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax

from jfp8.layers.options import check_operand, kernel_dtype, kernel_values
from jfp8.matmul.spec import Implementation
from jfp8.products.bias import plus_bias
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.mlp import observed_mlp
from jfp8.products.operation import Observed, Options, State, as_operands
from jfp8.products.shared_input import SharedInput
from jfp8.products.vjp import Planned
from jfp8.recipes.causality import Layer
from jfp8.recipes.in_effect import why_in_high_precision
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.notes import EXPLAINING, note


class Site(Protocol):
    """A module that computes one matmul of a layer, in Linen or NNX.

    `_in_effect` returns the recipe, None for high precision, and `_place` the path of the layer and
    of the matmul in it. `_begin` returns the state for one use; True if `_end` is to record the
    amaxes observed with it; and a warning for training that cannot keep what the recipe needs.
    """

    implementation: Implementation
    casts_kernel: bool

    def _in_effect(self) -> Recipe | None: ...
    def _place(self) -> tuple[str, str]: ...
    def _begin(self, recipe: Recipe) -> tuple[State, bool, str | None]: ...
    def _end(self, state: State, observed: Observed) -> None: ...


def multiply_at(
    site: Site,
    quantized: Callable[..., tuple[jax.Array, Observed]],
    plain: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array | ScaledArray,
    layer: Layer = "dense",
    shared: SharedInput | None = None,
) -> jax.Array:
    """Compute `quantized` of the operands under the recipe in effect, or `plain` without one.

    Reports name the `layer` that the matmul belongs to.
    """
    recipe, rhs_dtype = site._in_effect(), kernel_dtype(lhs, rhs, site.casts_kernel)
    if recipe is None:
        with note("reason", why_in_high_precision()):
            return plain(lhs, kernel_values(rhs, rhs_dtype, lhs.dtype))
    check_operand(lhs)
    options, state, records = _begin(site, recipe, rhs_dtype)
    with _noted(site, recipe, layer, state.histories is not None):
        y, observed = quantized(lhs, rhs, options=options, state=state._replace(shared=shared))
    if records:
        site._end(state, observed)
    return y


def _begin(site: Site, recipe: Recipe, rhs_dtype: Any) -> tuple[Options, State, bool]:
    state, records, warning = site._begin(recipe)
    return Options(recipe, site.implementation, rhs_dtype, if_trained=warning), state, records


class Begun(NamedTuple):
    """A matmul in FP8 of which all is decided: a part of an operation of several.

    Attributes:
      records: whether the site records what is observed.
      bias: the layer's.
    """

    site: Site
    planned: Planned
    records: bool
    bias: jax.Array | None


def begin_at(
    site: Site,
    plan: Callable[..., Planned],
    lhs: jax.Array,
    rhs: jax.Array | ScaledArray,
    bias: jax.Array | None = None,
) -> Begun:
    """Decide how the matmul is computed under the recipe in effect, of which there must be one."""
    recipe = site._in_effect()
    assert recipe is not None
    check_operand(lhs)
    lhs, rhs = as_operands(lhs, rhs)
    options, state, records = _begin(site, recipe, kernel_dtype(lhs, rhs, site.casts_kernel))
    return Begun(site, plan(lhs, rhs, options=options, state=state), records, bias)


def mlp_at(
    first: Begun, second: Begun, make: Callable[..., jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """Compute two matmuls with `make` between them; for the arguments see `observed_mlp`."""
    y, observed = observed_mlp(first.planned, second.planned, make, shape, first.bias)
    for begun, amaxes in zip((first, second), observed, strict=True):
        if begun.records:
            begun.site._end(begun.planned.state, amaxes)
    return plus_bias(y, second.bias)


@contextlib.contextmanager
def _noted(site: Site, recipe: Recipe, layer: Layer, has_histories: bool) -> Iterator[None]:
    """Return a context that notes the layer of a matmul, while a report is being made."""
    if EXPLAINING.value is None:
        yield
        return
    needs = not has_histories and recipe.init_state() is not None
    causal = recipe.is_causal(layer, history=has_histories)
    path, product = site._place()
    with (
        note("path", path),
        note("product", product),
        note("recipe", f"{recipe.name}, no histories" if needs else recipe.name),
        note("ahead", "" if causal else "later positions"),
    ):
        yield


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
