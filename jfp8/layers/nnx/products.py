"""The matmuls of NNX layers, and their state."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx
from flax.nnx.bridge.wrappers import current_linen_module
from jax import lax

from jfp8.layers.conv_math import ConvCall
from jfp8.layers.nnx.signatures import PrintsRecipe, SignatureOfClass
from jfp8.layers.site import DotGeneralCall, multiply_at
from jfp8.matmul.spec import Implementation
from jfp8.products import einsum
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.operation import Observed, State
from jfp8.products.shared_input import SharedInput
from jfp8.recipes.in_effect import is_overridden, recipe_in_effect
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import (
    CHECK,
    AmaxState,
    choose,
    fingerprint,
    intact,
    largest_of_examples,
    push_amax,
    seen,
)
from jfp8.scaling.sink import ROLES
from jfp8.tracing.notes import note


class Fp8State(nnx.Variable):
    """The amax history of one tensor of a matmul: ``f32[..., H]``, newest first, 0 = empty slot.

    Also the check of all three, ``f32[..., 1]``; see `jfp8.scaling.history`. Stacked layers have
    their leading axes in front.
    """

    __signature__ = SignatureOfClass()


class Fp8Sink(nnx.Variable):
    """Zeros ``f32[..., 3, 2050]``, whose gradient carries the amaxes of one matmul.

    `jfp8.nnx.value_and_grad` attaches them while it differentiates.
    """

    __signature__ = SignatureOfClass()


class Product(PrintsRecipe):
    """The base of the modules of this file: the recipe and the state.

    A call that is differentiated records the amaxes of lhs and rhs, as the newest entries of their
    histories; any other call, such as an evaluation, records nothing. Gradients use current
    scaling, because their amax is not recorded. With a sink (see `jfp8.nnx.value_and_grad`) a call
    records nothing, all three amaxes leave as the gradient of the sink, and gradients use their
    history.

    Attributes:
      recipe: the quantizer of each operand; None for the recipe of the `jfp8.autocast` region, or
        else ``DelayedScaling()``.
      implementation: see `jfp8.scaled_matmul`.
      path: path of the matmul in its model, ``"layers/0/linear1"``; "" if unknown.
      fp8: ``{"lhs", "rhs", "grad"}``, one `Fp8State` each; None for recipes without state.
      fp8_sink: `Fp8Sink`, or None.
      shared_input: see `SharedInput`, during a call of a layer that has several products of one
        array; otherwise None.
      casts_kernel: True if a kernel in f32 is cast to the dtype of the inputs; layers of jfp8
        leave the cast to the matmul.
    """

    def __init__(
        self,
        *,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
        path: str = "",
        leading: Sequence[int] = (),
        casts_kernel: bool = False,
    ) -> None:
        """Create the matmul and its state.

        Args:
          leading: shape of the axes along which layers are stacked, in front of every history.
        """
        self.recipe = None if recipe is None else check_recipe(recipe)
        self.implementation = implementation
        self.path = path
        self.casts_kernel = casts_kernel
        # The matmuls of a region that disables FP8 may be called outside it.
        recipe = recipe_in_effect(self.recipe, path) or self.recipe or DelayedScaling()
        self.fp8: Any = nnx.data(_empty_state(recipe, leading))
        self.fp8_sink: Fp8Sink | None = nnx.data(None)
        self.shared_input: SharedInput | None = nnx.data(None)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "recipe" or self.recipe is None or "fp8" not in vars(self):
            return
        # Histories of another length begin empty.
        leading = () if self.fp8 is None else self.fp8[CHECK].shape[:-1]
        recipe = self.recipe.for_layer(self.path)
        new = None if recipe is None else _empty_state(recipe, leading)
        shape = lambda state: None if state is None else state[ROLES[0]].shape
        self.fp8 = self.fp8 if shape(new) == shape(self.fp8) else nnx.data(new)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Accept an option that ``nnx.view`` sets.

        Args:
          use_running_average: makes no difference here.
        """

    def histories(self) -> dict[str, jax.Array]:
        """Return the three amax histories; only for a matmul that has some."""
        return self._histories()

    def set_histories(self, histories: dict[str, jax.Array]) -> None:
        """Replace the amax histories of the tensors that `histories` names."""
        new = {**self._intact_histories(), **histories}
        self._overwrite(new, fingerprint(new))

    # Flax's `nnx.tabulate` traces methods without an underscore as if they were layers.
    def _histories(self) -> dict[str, jax.Array]:
        return {role: self.fp8[role].get_value() for role in ROLES}

    def _check(self) -> jax.Array:
        """Return the `fingerprint` that the histories should have, f32[...]."""
        return self.fp8[CHECK].get_value()[..., 0]

    def _intact_histories(self) -> dict[str, jax.Array]:
        """Return the histories if they are `intact`, else empty ones."""
        return intact(self._histories(), self._check())

    def _overwrite(self, histories: dict[str, jax.Array], check: jax.Array) -> None:
        """Replace histories, and the `fingerprint` of all three, without reading the old ones."""
        for role, history in histories.items():
            self.fp8[role].set_value(history)
        self.fp8[CHECK].set_value(check[..., None])

    def _multiply(self, *how: Any, shared: SharedInput | None = None) -> jax.Array:
        """Compute `multiply_at`, in a scope named after the path."""
        warn_inside_linen(self.path)
        scope = jax.named_scope(self.path) if self.path else contextlib.nullcontext()
        with scope, note("path", self.path):
            return multiply_at(self, *how, shared=shared or self.shared_input)

    def _begin(self, recipe: Recipe) -> tuple[State, bool, str | None]:
        histories, sink = self._read_state(recipe), None
        if histories is not None and self.fp8_sink is not None:
            sink = self.fp8_sink.get_value()
        records = histories is not None and sink is None
        lost = why_lost(self) if records else None
        return State(histories, sink), records and lost is None, lost

    def _end(self, state: State, observed: Observed) -> None:
        record(self, observed)

    def _in_effect(self) -> Recipe | None:
        return recipe_in_effect(self.recipe, self.path)

    def _place(self) -> tuple[str, str]:
        return self.path, ""

    def _read_state(self, recipe: Recipe) -> dict[str, AmaxState] | None:
        if self.fp8 is None or is_overridden():
            return None
        # A region may set a recipe without state, for its duration.
        if self.recipe is None and recipe.init_state() is None:
            return None
        histories = histories_to_read(self)
        leading = histories["lhs"].shape[:-1]
        if leading:
            raise ValueError(
                f"The amax histories of {_name(self)} are stacked along {leading}, but the layer "
                "was called as a single one. Lift its state as you lift its parameters: "
                "nnx.scan(..., in_axes=(nnx.Carry, 0)), or name it, nnx.StateAxes({(nnx.Param, "
                "jfp8.nnx.Fp8State, jfp8.nnx.Fp8Sink): 0, ...: None})."
            )
        none = jnp.zeros((), jnp.float32)
        return {role: {"amax_history": h, "amax": none} for role, h in histories.items()}


def _empty_state(recipe: Recipe, leading: Sequence[int]) -> nnx.Dict | None:
    state = recipe.init_state()
    if state is None:
        return None
    # An array in each Variable, not a dict in one: nnx.replace_by_pure_dict needs that.
    empty = lambda *shape: Fp8State(jnp.zeros((*leading, *shape), jnp.float32))
    histories = {role: empty(*state[role]["amax_history"].shape) for role in ROLES}
    return nnx.Dict({CHECK: empty(1), **histories})


def histories_to_read(product: Product) -> dict[str, jax.Array]:
    """Return the three histories from which the scales of a step follow."""
    # With a sink, `jfp8.nnx.value_and_grad` has checked them.
    read = product._intact_histories if product.fp8_sink is None else product._histories
    return lax.stop_gradient(read())  # a path filter may differentiate by them


def why_lost(product: Product) -> str | None:
    """Return why amaxes that a call records are lost, as a warning; None if they are kept."""
    name, module = _name(product), current_linen_module()
    collection = nnx.variable_name_from_type(Fp8State, allow_register=True)
    if module is not None and not module.is_mutable_collection(collection):
        return (
            f"{name} in nnx.bridge.to_linen records amaxes in the collection {collection!r}, "
            "which is not mutable: histories do not change. Return (loss, mutated) from the "
            "loss function, of y, mutated = model.apply(variables, x, "
            f"mutable=[{collection!r}]); or use recipe='current'."
        )
    try:
        product.fp8[CHECK].set_value(product.fp8[CHECK].get_value())
    except errors.TraceContextError:
        return (
            f"{name} records amaxes where a gradient is computed, but here it is called inside "
            "a JAX transformation and was created outside, where they cannot go, so that "
            "histories do not change. Pass the model as an argument to nnx.jit, nnx.grad, "
            "nnx.scan, nnx.vmap or nnx.remat, not to jax's; or create it inside: "
            "nnx.merge(graphdef, state, copy=True)."
        )
    return None


def record(product: Product, observed: Observed) -> None:
    """Make the amaxes the newest entries of lhs and rhs, unless nothing was observed."""
    histories, check = lax.stop_gradient((product._histories(), product._check()))
    new, largest = dict(intact(histories, check)), []
    for role, amax in zip(Observed._fields, observed, strict=True):
        amax = largest_of_examples(seen(amax, histories[role]), histories[role])
        largest.append(amax)
        new[role] = push_amax(new[role], amax)
    kept = choose(jnp.maximum(*largest) > 0, (new, fingerprint(new)), (histories, check))
    product._overwrite(*kept)


def _name(product: Product) -> str:
    name = type(product).__name__
    return f"{name} at {product.path!r}" if product.path else name


def warn_inside_linen(path: str) -> None:
    """Warn if a Linen module during initialization calls an NNX layer as if it held it."""
    module = current_linen_module()
    if module is not None and module.is_initializing() and not hasattr(module, "nnx_class"):
        warnings.warn(
            f"An NNX layer{path and f' at {path!r}'} is called by the Linen module "
            f"{type(module).__name__}, which does not hold its parameters: init returns none of "
            "them, and they are not trained. Use the layer of the same name in jfp8, such as "
            "jfp8.Dense, or nnx.bridge.to_linen(jfp8.nnx.Linear, 16, 8).",
            stacklevel=2,
        )


class DotGeneral(DotGeneralCall, Product):
    """An FP8 ``dot_general`` with its state, for ``nnx.Linear(..., dot_general=DotGeneral())``.

    Each layer needs a separate one. For the arguments and attributes see `Product`.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> layer = nnx.Linear(3, 4, dot_general=jfp8.nnx.DotGeneral(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """


class ConvGeneralDilated(ConvCall, Product):
    """An FP8 ``conv_general_dilated`` with its state, for ``nnx.Conv(conv_general_dilated=...)``.

    Each layer needs a separate one. For the arguments and attributes see `Product`.
    """


class EinsumOp(Product):
    """An FP8 ``einsum`` of two operands with its state, for ``nnx.Einsum(..., einsum_op=...)``.

    Each layer needs a separate one. For the arguments and attributes see `Product`.
    """

    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array | ScaledArray,
        *,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Return ``jnp.einsum(equation, lhs, rhs)`` in FP8; see `jfp8.linen.EinsumProduct`.

        Args:
          out_sharding: sharding of the result, for meshes with explicit axes.

        Raises:
          ValueError: `equation` does not have two operands.
        """
        preferred = {"preferred_element_type": preferred_element_type}

        def quantized(lhs: Any, rhs: Any, **options: Any) -> tuple[jax.Array, Observed]:
            seen = []

            def dot_general(lhs: Any, rhs: Any, numbers: Any) -> jax.Array:
                y, observed = observed_dot_general(lhs, rhs, numbers, **preferred, **options)
                seen.append(observed)
                return y

            terms = einsum.parse(equation, lhs.ndim, rhs.ndim)
            rhs_dtype = options["options"].rhs_dtype
            y = einsum.as_dot_general(terms, lhs, rhs, dot_general, rhs_dtype)
            return y if out_sharding is None else jax.sharding.reshard(y, out_sharding), seen[0]

        how = {"precision": precision, "out_sharding": out_sharding, **preferred}
        return self._multiply(quantized, partial(jnp.einsum, equation, **how), lhs, rhs)
