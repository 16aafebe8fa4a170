"""The matmuls of Linen layers, and their state."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta, unfreeze
from flax.linen import dtypes
from jax import lax

from jfp8.layers.conv_math import ConvCall
from jfp8.layers.linen import messages
from jfp8.layers.linen.state_in_gradients import (
    NAME,
    OVERWRITTEN,
    StateCollection,
    check_state_collection,
)
from jfp8.layers.options import promoted
from jfp8.layers.site import DotGeneralCall, multiply_at
from jfp8.matmul.spec import Implementation
from jfp8.products.operation import Observed, State
from jfp8.recipes.in_effect import is_overridden, recipe_of_matmul
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.history import (
    CHECK,
    AmaxState,
    intact_states,
    record,
    resume_recorded,
)
from jfp8.scaling.sink import ROLES, init_sink
from jfp8.scaling.state_in_gradients import init_overwritten, read_overwritten
from jfp8.tracing.caller import user_level


class ProductModule(nn.Module):
    """The base of the modules of this file: the recipe, and the location of the state.

    Attributes:
      recipe: the quantizer of each operand; None for the recipe of the `jfp8.autocast` region, or
        else ``DelayedScaling()``.
      implementation: see `jfp8.scaled_matmul`.
      state_collection: ``"_overwrite_with_gradient"``: the state is one variable of that
        collection, whose gradient is its next value; see `jfp8.linen`.
      casts_kernel: True if a kernel in f32 is cast to the dtype of the inputs; layers of jfp8
        leave the cast to the matmul.
    """

    recipe: RecipeLike | None = None
    implementation: Implementation = None
    _: KW_ONLY
    state_collection: StateCollection = "fp8"
    casts_kernel: bool = False

    @nn.nowrap
    def _multiply(self, *how: Any, **options: Any) -> jax.Array:
        return multiply_at(self, *how, **options)

    @nn.nowrap
    def _in_effect(self) -> Recipe | None:
        own = None if self.recipe is None else check_recipe(self.recipe)
        return recipe_of_matmul(own, "/".join(self.path[:-1]))

    @nn.nowrap
    def _begin(self, recipe: Recipe) -> tuple[State, bool, str | None]:
        if self.state_collection != "fp8":
            check_state_collection(self.state_collection)
        draws = recipe.products().stochastic and self.has_rng("fp8")
        key = self.make_rng("fp8") if draws else None
        if self.state_collection == OVERWRITTEN:
            histories, sink = self._read_overwritten(recipe)
        else:
            sink = self._read_sink(recipe)
            histories = self._read_state(recipe, sink)
        records = self.state_collection == "fp8" and self.is_mutable_collection("fp8")
        records = records and histories is not None and not self.is_initializing()
        if histories is not None and records:
            # The collection is returned next to the loss, and nobody trains it.
            histories = lax.stop_gradient(histories)
            if self._is_used_again():
                histories = {role: resume_recorded(state) for role, state in histories.items()}
        warning = self._warning(recipe) if histories is None else None
        return State(histories, sink, key), records, warning

    @nn.nowrap
    def _warning(self, recipe: Recipe) -> str | None:
        needless = self.is_initializing() or is_overridden() or recipe.init_state() is None
        return None if needless else messages.WITHOUT_HISTORIES

    @nn.nowrap
    def _end(self, state: State, observed: Observed) -> None:
        """Write the amaxes of lhs and rhs into the mutable ``fp8`` collection.

        Without a sink this ``apply`` is the step; with one `advance` will end the step. If nothing
        was observed, since no derivative is taken, the collection keeps its values.
        """
        assert state.histories is not None
        amaxes, at_once = observed._asdict(), state.sink is None
        new = record(self._kept(), state.histories, amaxes, at_once=at_once)
        for name, value in new.items():
            self._put("fp8", name, value)

    @nn.nowrap
    def _is_used_again(self) -> bool:
        """Return True if this ``apply`` has used the matmul before, or may have.

        It may have within a lifted transformation, whose scopes begin at a path: a body may be
        traced once and run twice.
        """
        assert self.scope is not None
        root, mark = self.scope.root, f"{self.scope.path_text} has recorded"
        if root.path or root.name_reserved(mark):
            return True
        root.reserve(mark)
        return False

    @nn.nowrap
    def _place(self) -> tuple[str, str]:
        """Return the path of the layer that has this matmul, and the path of the matmul in it."""
        module: Any = self
        depth = len(self.path)
        while depth and isinstance(module, ProductModule):
            module, depth = module.parent, depth - 1
        return "/".join(self.path[:depth]), "/".join(self.path[depth:])

    @nn.nowrap
    def _read_state(self, recipe: Recipe, sink: jax.Array | None) -> dict[str, AmaxState] | None:
        """Return the histories, created if missing and allowed; None without histories."""
        empty = recipe.init_state()
        # State of a layer whose recipe has none is a mistake, unless it is only there temporarily.
        if empty is None and self.recipe is None:
            return None
        if self.has_variable("fp8", ROLES[0]):
            return self._read_intact(checks=sink is None)
        if empty is None or not self.is_mutable_collection("fp8"):
            return None
        for name, value in {**empty, CHECK: jnp.zeros((), jnp.float32)}.items():
            self._put("fp8", name, value)
        return {role: self._get("fp8", role) for role in ROLES}

    @nn.nowrap
    def _read_intact(self, *, checks: bool) -> dict[str, AmaxState]:
        """Return the existing histories.

        Trees that users have averaged, or that `nn.map_variables` maps, are checked. Training does
        not check: its next entry is right, and on a GPU the check takes five small kernels.
        """
        product = self._kept()
        is_mapped = self.scope is not None and "map_variables(" in self.scope.path_text
        return intact_states(product) if checks or is_mapped else {r: product[r] for r in ROLES}

    @nn.nowrap
    def _kept(self) -> dict[str, Any]:
        """Return the state as the collection has it; from before there were checks it has none."""
        names = filter(partial(self.has_variable, "fp8"), (*ROLES, CHECK))
        return {name: self._get("fp8", name) for name in names}

    @nn.nowrap
    def _read_sink(self, recipe: Recipe) -> jax.Array | None:
        """Return the sink, if the loss may be differentiated with respect to it; else None."""
        if self.is_initializing():
            if self.is_mutable_collection("fp8_sink") and recipe.init_state() is not None:
                self._put("fp8_sink", "amax", init_sink())
            return None
        if self.is_mutable_collection("fp8_sink") or not self.has_variable("fp8_sink", "amax"):
            return None
        return self._get("fp8_sink", "amax")

    @nn.nowrap
    def _read_overwritten(self, recipe: Recipe) -> tuple[dict[str, AmaxState] | None, Any]:
        """Return histories and sink from the variable whose gradient replaces it, or None."""
        empty = recipe.init_state()
        if empty is None and self.recipe is None:
            return None, None
        exists = self.has_variable(OVERWRITTEN, NAME)
        if self.is_initializing():
            if empty is not None and not exists and self.is_mutable_collection(OVERWRITTEN):
                self._put(OVERWRITTEN, NAME, init_overwritten(empty))
        elif exists:
            if self.is_mutable_collection(OVERWRITTEN):
                warnings.warn(messages.UNCHANGED, stacklevel=user_level())
            return read_overwritten(self._get(OVERWRITTEN, NAME), empty)
        return None, None

    @nn.nowrap
    def _get(self, collection: str, name: str) -> Any:
        return meta.unbox(self.get_variable(collection, name))

    @nn.nowrap
    def _put(self, collection: str, name: str, value: Any) -> None:
        if self.has_variable(collection, name):  # in boxes, if the arrays were in some
            value = meta.replace_boxed(unfreeze(self.get_variable(collection, name)), value)
        self.put_variable(collection, name, value)


class DotGeneral(DotGeneralCall, ProductModule):
    """An FP8 ``dot_general`` with its state, for ``nn.Dense(dot_general_cls=DotGeneral)``.

    Use ``functools.partial(DotGeneral, recipe=...)`` for a recipe other than the default. For the
    attributes see `ProductModule`.
    """

    __call__ = nn.compact(DotGeneralCall.__call__)


class ConvGeneralDilated(ConvCall, ProductModule):
    """FP8 ``conv_general_dilated`` with its state, for ``nn.Conv(conv_general_dilated_cls=...)``.

    Use ``functools.partial(ConvGeneralDilated, recipe=...)`` for a recipe other than the default.
    For the attributes see `ProductModule`.
    """

    __call__ = nn.compact(ConvCall.__call__)


@dataclass(frozen=True)
class ProductOf:
    """Create the product of a layer. Unlike a partial it compares by value, for ``nn.jit``.

    The layer leaves the cast of its kernel to the matmul, see `promote_dtype`.
    """

    module: type[ProductModule]
    recipe: RecipeLike | None
    implementation: Implementation
    state_collection: StateCollection = "fp8"

    def __post_init__(self) -> None:
        if self.recipe is not None:
            object.__setattr__(self, "recipe", check_recipe(self.recipe))

    def __repr__(self) -> str:
        return f"jfp8.linen.{self.module.__name__}"

    def __call__(self, **where: Any) -> ProductModule:
        return self.module(
            recipe=self.recipe,
            implementation=self.implementation,
            state_collection=self.state_collection,
            casts_kernel=True,
            **where,
        )


def promote_dtype(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Return inputs, a kernel and a bias as Flax's ``promote_dtype`` casts them; see `promoted`."""
    promote = partial(dtypes.promote_dtype, dtype=dtype, inexact=inexact)
    return promoted(lambda arrays: promote(*arrays), arrays, casts_kernel=True)
