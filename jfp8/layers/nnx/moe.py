"""Mixture of experts: grouped matmuls with their state, and the block made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer

from jfp8.layers import moe_math, transformer_math
from jfp8.layers.nnx.layers import Linear
from jfp8.layers.nnx.parts import Parts
from jfp8.layers.nnx.products import Product
from jfp8.layers.nnx.signatures import ExplicitModule, SignatureOfClass
from jfp8.layers.options import options_of, promoted
from jfp8.layers.site import Begun, begin_at, mlp_at
from jfp8.layers.transformer_options import InFeatures
from jfp8.matmul.spec import Implementation
from jfp8.products.mlp import hidden_like
from jfp8.products.ragged import routing
from jfp8.products.ragged.exchange import Exchange, plan_exchange
from jfp8.products.ragged.expert_mesh import ExpertMesh, expert_mesh
from jfp8.products.ragged.expert_rows import ExpertRows, FromExperts, ToExperts
from jfp8.products.ragged.experts import can_be_divided, height_for, planned_expert_dot
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike
from jfp8.tracing.shardings import sharded_like

default_kernel_init = nnx.initializers.lecun_normal()


class RaggedDot(moe_math.RaggedDotCall, Product):
    """An FP8 ``ragged_dot`` with its state.

    The history for "rhs" records the largest amax of all groups, but is not read: each group's
    matrix is scaled by its own amax. For the arguments and attributes see `Product`.
    """


class ExpertDense(ExplicitModule):
    """A dense layer for each expert: ``y_i = x_i @ kernel_e`` for each token i of expert e.

    The parameter is ``kernel``, ``[num_experts, in, features]``, which may be a `ScaledArray`.

    Args:
      num_experts, in_features, features: sizes of the kernel.
      dtype, param_dtype, precision: see ``flax.nnx.Linear``.
      kernel_init: makes the kernel of one expert, ``[in, features]``.
      recipe, implementation: see `Product`.
      rngs: stream ``params`` for initial values.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.dtype = dtype
        self.precision = precision
        parts, shape = Parts.of(rngs), (in_features, features)
        kernels = kernel_init, num_experts, shape, param_dtype
        self.kernel = parts.parameter("kernel", moe_math.expert_kernels, *kernels)
        how: dict[str, Any] = {"recipe": recipe, "implementation": implementation}
        self.ragged_dot = parts.bare(RaggedDot, "RaggedDot_0", casts_kernel=True, **how)

    def __call__(self, inputs: jax.Array, group_sizes: jax.Array | ExpertRows) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: ``[tokens, in]``, sorted by expert.
          group_sizes: i32[num_experts], the tokens of each expert; or the rows of experts, see
            `observed_expert_dot`.
        """
        x, kernel = self._operands(inputs)
        # By name, for Flax's `nnx.tabulate`, which shows a dataclass only so.
        return self.ragged_dot(x, kernel, group_sizes=group_sizes, precision=self.precision)

    def _begin(self, inputs: jax.Array, rows: ExpertRows) -> Begun:
        """Decide how the layer is computed as a part of a larger operation."""
        plan = partial(planned_expert_dot, rows=rows)
        return begin_at(self.ragged_dot, plan, *self._operands(inputs))

    def _operands(self, inputs: jax.Array) -> Sequence[Any]:
        promote = partial(dtypes.promote_dtype, dtype=self.dtype)
        return promoted(promote, (inputs, self.kernel.get_value()), casts_kernel=True)


class RouterBias(nnx.Variable):
    """The bias by which a `Router` balances its experts, ``f32[num_experts]``."""

    __signature__ = SignatureOfClass()


class Router(nnx.Module):
    """Choose each token's experts, by a matmul in high precision; see `routing.route` and `MoE`.

    The parameter is ``kernel``, ``[in, num_experts]``. With a `bias_update_rate` there is a
    `RouterBias`, too, which every call updates in training, as ``BatchNorm`` does its statistics.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        kernel_init: Initializer = default_kernel_init,
        param_dtype: Dtype = jnp.float32,
        route: moe_math.Route = routing.route,
        bias_update_rate: float | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        moe_math.check_bias_update_rate(bias_update_rate)
        self.num_experts_per_token = num_experts_per_token
        self.route = route
        self.bias_update_rate = bias_update_rate
        self.use_running_average = False
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, num_experts), param_dtype))
        self.bias: RouterBias | None = nnx.data(None)
        if bias_update_rate is not None:
            self.bias = RouterBias(jnp.zeros(num_experts, jnp.float32))

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Leave the bias as it is, or not: what ``model.eval()`` and ``nnx.view`` set."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, tokens: jax.Array) -> routing.Routing:
        """Route `tokens`, ``[tokens, in]``; and update the bias, in training."""
        logits = moe_math.router_logits(tokens, self.kernel.get_value())
        given = {} if self.bias is None else {"bias": self.bias.get_value()}
        routed = moe_math.routed_by(self.route, self.num_experts_per_token, logits, **given)
        if self.bias is not None and self.bias_update_rate and not self.use_running_average:
            bias, rate = self.bias.get_value(), self.bias_update_rate
            try:
                self.bias.set_value(routing.updated_bias(bias, routed.group_sizes, rate))
            except errors.TraceContextError as error:
                raise ValueError(
                    "The router updates its bias in training, but here it is called inside a JAX "
                    "transformation and was made outside, where the bias cannot go. Pass the model "
                    "as an argument to nnx.jit, nnx.grad, nnx.scan or nnx.remat, not to jax's. To "
                    "leave the bias as it is: model.eval(), or "
                    "nnx.view(model, use_running_average=True)."
                ) from error
        return routed


@dataclass(eq=False, repr=False)
class MoE(moe_math.MoEOptions, InFeatures, ExplicitModule):
    """A feed-forward block in which each token uses a few experts out of many.

    It computes what `jfp8.linen.MoE` does, with the same parameters: ``router/kernel``,
    ``wi/kernel``, ``wo/kernel``. With `bias_update_rate` the bias is a `RouterBias`, which each
    call updates until ``model.eval()``; over devices in ``nnx.shard_map`` loads are added up. It
    moves also in a step whose loss is not finite, by the rate at most.

    The losses of `jfp8.linen.MoE` are sown as ``nnx.Intermediate``, for ``nnx.capture``.

    Args:
      in_features: features of the input and the result.
      rngs: stream ``params`` for initial values. For the others see `jfp8.linen.MoE`.

    Raises:
      ValueError: unknown `activation`; more experts per token than there are; a
        negative `bias_update_rate`; a bias that is to be updated inside a transformation of
        JAX's own.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> moe = jfp8.nnx.MoE(8, num_experts=4, intermediate_dim=16, rngs=nnx.Rngs(0))
    >>> moe.wi.kernel.shape, moe(jnp.ones((2, 3, 8))).shape
    ((4, 8, 32), (2, 3, 8))
    """

    _: KW_ONLY
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        parts, features, width = Parts.of(rngs), self.in_features, self.intermediate_dim
        projections = self.projections = transformer_math.projections_of(self.activation)
        names = "num_experts", "num_experts_per_token", "param_dtype", "route", "bias_update_rate"
        options = {"kernel_init": self.router_init, **options_of(self, names)}
        self.router = parts.layer(Router, "router", features, **options)
        names = "dtype", "param_dtype", "kernel_init", "recipe", "implementation"
        options = options_of(self, names)
        dense = partial(parts.layer, ExpertDense, num_experts=self.num_experts, **options)
        self.wi = dense("wi", in_features=features, features=projections * width)
        self.wo = dense("wo", in_features=width, features=features)
        self.shared_wi = self.shared_wo = nnx.data(None)
        width = self.shared_intermediate_dim
        if width is not None:
            of_all = partial(parts.layer, Linear, use_bias=False, **options)
            self.shared_wi = of_all("shared_wi", features, projections * width)
            self.shared_wo = of_all("shared_wo", width, features)

    def __call__(self, inputs: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Apply the block.

        Args:
          inputs: ``[..., in_features]``; every leading dimension counts tokens.

        Returns:
          ``[..., in_features]``; or a pair, see `return_load_balancing_loss`.
        """
        products = self.wi.ragged_dot, self.wo.ragged_dot
        recipes = [recipe_in_effect(product.recipe, product.path) for product in products]
        y, sown = self._apply(inputs, [recipe for recipe in recipes if recipe is not None])
        if hasattr(self, "__captures__"):  # in nnx.capture; elsewhere sow changes the module
            for name, value in sown.items():
                self.sow(nnx.Intermediate, name, value)
        return y

    # Flax's `nnx.tabulate` has a row for each called method without an underscore.
    def _apply(
        self, inputs: jax.Array, recipes: Sequence[Recipe]
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Return the result, and what to sow, by the `recipes` of both matmuls."""
        axes = (self.expert_axis, self.data_axes, self.tensor_axis)
        mesh, shape = expert_mesh(*axes, self.num_experts), inputs.shape
        tokens = sharded_like(mesh.rows, partial(jnp.reshape, shape=(-1, shape[-1])), inputs)
        routed = self.router(tokens)
        sown = moe_math.losses_of(routed, shape)
        y, exchange = self._through_experts(tokens, routed, mesh, recipes)
        if self.capacity_factor is not None:
            sown["dropped"] = 1 - jnp.sum(exchange.sizes) / max(routed.experts.size, 1)
            moe_math.warn_if_many(sown["dropped"], self.capacity_factor)
        if self.shared_wi is not None and self.shared_wo is not None:
            hidden = self.shared_wi(tokens)
            y += self.shared_wo(sharded_like(hidden, self._activated, hidden))
        y = sharded_like(inputs, partial(jnp.reshape, shape=shape), y)
        result = (y, sown["load_balancing_loss"]) if self.return_load_balancing_loss else y
        return result, sown

    def _activated(self, hidden: jax.Array, *parts: int) -> jax.Array:
        """Return the activation of ``[..., features]``, of as many `parts` of these, if given."""
        apart = hidden.reshape(*hidden.shape[:-1], *parts, self.projections, -1)
        how = {"saved_activations": self.saved_activations}
        made = transformer_math.activate(apart, self.activation, **how)
        return made.reshape(*hidden.shape[:-1], -1)

    def _through_experts(
        self,
        tokens: jax.Array,
        routed: routing.Routing,
        mesh: ExpertMesh,
        recipes: Sequence[Recipe],
    ) -> tuple[jax.Array, Exchange]:
        """Return for each token the weighted sum of what its experts make of it, ``[t, in]``. ::

            y = sum over the chosen e of  weight_e * activation(x . wi_e) . wo_e

        Also the exchange of tokens over the `mesh`, over which they and experts are sharded.
        """
        (count, k), groups = routed.experts.shape, routed.probabilities.shape[1]
        more = [(0, -count % mesh.parts), (0, 0)]  # rows without an expert: tokens divide evenly
        height = height_for(recipes, self.implementation)

        def pad(tokens: jax.Array, experts: jax.Array) -> tuple[jax.Array, Exchange]:
            experts = jnp.pad(experts, more, constant_values=groups)
            planned = plan_exchange(experts, groups, mesh, height, self.capacity_factor)
            return jnp.pad(tokens, more), planned

        def weighted(y: jax.Array, weights: jax.Array) -> jax.Array:
            each = y.reshape(-1, k, y.shape[-1])[:count].astype(jnp.float32)
            return jnp.sum(each * weights[:, :, None], axis=1).astype(y.dtype)

        padded, exchange = sharded_like(mesh.rows, pad, tokens, routed.experts)
        divided = can_be_divided(self.intermediate_dim, mesh, recipes)
        rows, back = ToExperts(exchange, divided, self.projections), FromExperts(exchange, divided)
        apart = divided or self.saved_activations is not None
        if apart or not transformer_math.may_be_one_operation(recipes, tokens):
            # By name, for Flax's `nnx.tabulate`, which shows a dataclass only so.
            hidden = self.wi(padded, group_sizes=rows)
            parts = (mesh.tensor,) if divided else ()
            activated = lambda hidden: self._activated(hidden, *parts)
            y = self.wo(sharded_like(hidden, activated, hidden), group_sizes=back)
        else:
            width = self.intermediate_dim
            shape = (exchange.group.size, exchange.height, self.projections, width)
            first = self.wi._begin(padded, rows)
            second = self.wo._begin(hidden_like(first.planned, shape), back)
            y = mlp_at(first, second, transformer_math.Activation(self.activation), shape)
        return sharded_like(mesh.rows, weighted, y, routed.weights), exchange
