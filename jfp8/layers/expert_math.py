"""A mixture of experts between its router and its result, without a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jfp8.layers import transformer_math
from jfp8.matmul.choice import Implementation
from jfp8.products.ragged.exchange import plan_exchange
from jfp8.products.ragged.expert_mesh import ExpertMesh
from jfp8.products.ragged.experts import ExpertRows, can_be_divided, height_for
from jfp8.products.ragged.routing import Routing
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.formats import Format

Layer = Callable[[jax.Array, ExpertRows], jax.Array]


def through_experts(
    tokens: jax.Array,
    routed: Routing,
    wi: Layer,
    wo: Layer,
    *,
    intermediate_dim: int,
    mesh: ExpertMesh,
    recipes: Sequence[Recipe],
    implementation: Implementation,
    activation: str,
    saved_activations: Format | None,
    capacity_factor: float | None,
) -> jax.Array:
    """For each token, the weighted sum of what its experts make of it. ::

        y = sum over the chosen e of  weight_e * activation(x . wi_e) . wo_e

    Args:
      tokens: ``[t, in]``.
      routed: which experts they go to.
      wi, wo: the products with the matrices of all experts.
      intermediate_dim: features between both products.
      mesh: what divides tokens and experts over devices.
      recipes: of both products.
      implementation: see `scaled_ragged_dot`.
      activation, saved_activations: see `transformer_math.activate`.
      capacity_factor: see `plan_exchange`.

    Returns:
      f32[t, in].
    """
    (count, k), groups = routed.experts.shape, routed.probabilities.shape[1]
    more = -count % mesh.parts  # of no expert, so that tokens can be divided evenly
    experts = jnp.pad(routed.experts, [(0, more), (0, 0)], constant_values=groups)
    height = height_for(recipes, implementation)
    exchange = plan_exchange(experts, groups, mesh, height, capacity_factor)

    n = transformer_math.projections_of(activation)
    divided = can_be_divided(intermediate_dim, mesh, recipes)
    parts = mesh.tensor if divided else 1
    hidden = wi(jnp.pad(tokens, [(0, more), (0, 0)]), ExpertRows(exchange, "lhs", divided, n))
    hidden = hidden.reshape(*hidden.shape[:2], parts, n, intermediate_dim // parts)
    hidden = transformer_math.activate(hidden, activation, saved_activations=saved_activations)
    hidden = hidden.reshape(*hidden.shape[:2], intermediate_dim)
    y = wo(hidden, ExpertRows(exchange, "result", divided))
    y = y.reshape(-1, k, y.shape[-1])[:count].astype(jnp.float32)
    return jnp.sum(y * routed.weights[:, :, None], axis=1)


def recipes_in_effect(recipe: Recipe | str | None, paths: Sequence[str]) -> list[Recipe]:
    """Those of the products at `paths`, but for those in high precision."""
    own = None if recipe is None else check_recipe(recipe)
    found = (recipe_in_effect(own, path) for path in paths)
    return [each for each in found if each is not None]
