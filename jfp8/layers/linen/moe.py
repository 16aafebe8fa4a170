"""Mixture of experts: grouped matmuls with their state, and the block made of them."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jfp8.layers import moe_math
from jfp8.layers.linen.layers import Dense
from jfp8.layers.linen.nnx_blocks import block_in
from jfp8.layers.linen.products import ProductModule
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.layers.nnx import moe as nnx_moe
from jfp8.layers.nnx.layers import Linear
from jfp8.layers.site import Begun
from jfp8.matmul.spec import Implementation
from jfp8.products.ragged import routing
from jfp8.products.ragged.expert_rows import ExpertRows
from jfp8.recipes.in_effect import recipes_in_effect
from jfp8.recipes.registry import RecipeLike


class RaggedDot(moe_math.RaggedDotCall, ProductModule):
    """An FP8 ``ragged_dot`` with its state.

    It has the state that every product has. The history for "rhs" records the largest amax of all
    groups, but is not read: each group's matrix is scaled by its own amax. For the attributes see
    `ProductModule`.
    """

    __call__ = nn.compact(moe_math.RaggedDotCall.__call__)


class ExpertDense(nn.Module):
    """A dense layer for each expert: ``y_i = x_i @ kernel_e`` for each token i of expert e.

    The ``params`` are ``kernel``, ``[num_experts, in, features]``, which may be a `ScaledArray`.

    Attributes:
      num_experts, features: sizes of the kernel.
      dtype, param_dtype, precision: see ``flax.linen.Dense``.
      kernel_init: makes the kernel of one expert, ``[in, features]``.
      recipe, implementation, state_collection: see `jfp8.Dense`.
    """

    num_experts: int
    features: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: Any = None
    kernel_init: Initializer = nn.linear.default_kernel_init
    recipe: RecipeLike | None = None
    implementation: Implementation = None
    _: KW_ONLY
    state_collection: StateCollection = "fp8"

    def __call__(self, inputs: jax.Array, group_sizes: jax.Array | ExpertRows) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: ``[tokens, in]``, sorted by expert.
          group_sizes: i32[num_experts], the tokens of each expert; or see `RaggedDot`.
        """
        return self._block(inputs)(inputs, group_sizes)

    def _begin(self, inputs: jax.Array, rows: ExpertRows) -> Begun:
        """Decide how the layer is computed as a part of a larger operation."""
        return self._block(inputs)._begin(inputs, rows)

    @nn.compact
    def _block(self, inputs: jax.Array) -> nnx_moe.ExpertDense:
        kinds, size = {nnx_moe.RaggedDot: RaggedDot}, inputs.shape[-1]
        return block_in(self, nnx_moe.ExpertDense, kinds, in_features=size)


class Router(nn.Module):
    """Choose each token's experts, by a matmul in high precision; see `routing.route` and `MoE`.

    Its weights are few, and a wrong expert costs more than a rounded product. The ``params`` are
    ``kernel``, ``[in, num_experts]``. With a `bias_update_rate`, ``bias``, f32[num_experts], is in
    the collection ``router_bias``.
    """

    num_experts: int
    num_experts_per_token: int
    kernel_init: Initializer
    param_dtype: Dtype = jnp.float32
    _: KW_ONLY
    route: moe_math.Route = routing.route
    bias_update_rate: float | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> routing.Routing:
        """Route `tokens`, ``[tokens, in]``; and update the bias, if its collection is mutable."""
        shape = (tokens.shape[-1], self.num_experts)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        logits, rate = moe_math.router_logits(tokens, kernel), self.bias_update_rate
        moe_math.check_bias_update_rate(rate)
        if rate is None:
            return moe_math.routed_by(self.route, self.num_experts_per_token, logits)
        updates, path = self.is_mutable_collection(ROUTER_BIAS), "/".join(self.path)
        if not updates and not self.has_variable(ROUTER_BIAS, "bias"):
            raise ValueError(
                f"The router {path!r} has bias_update_rate={rate}, but there is no {ROUTER_BIAS!r} "
                "collection, so that it would choose other experts than in training. Pass all that "
                "model.init(...) returned and training has updated, "
                f"model.apply({{'params': params, {ROUTER_BIAS!r}: ...}}, x). Under nn.scan or "
                "nn.vmap lift it like the parameters: "
                f"variable_axes={{'params': 0, {ROUTER_BIAS!r}: 0, ...}}."
            )
        bias = self.variable(ROUTER_BIAS, "bias", jnp.zeros, (self.num_experts,), jnp.float32)
        if rate and not updates:
            message = (
                f"A gradient is computed through the router {path!r}, whose bias balances the "
                f"experts, but the {ROUTER_BIAS!r} collection is not mutable, so the bias stays as "
                "it is. In training write y, mutated = model.apply(variables, x, mutable=["
                f"{ROUTER_BIAS!r}]) and keep what is in mutated for the next step: return it from "
                "the loss_fn of jfp8.value_and_grad. To keep the bias as it is, make the model "
                "with bias_update_rate=0.0."
            )
            logits = moe_math.warned_if_trained(message, logits)
        k = self.num_experts_per_token
        routed = moe_math.routed_by(self.route, k, logits, bias=bias.value)
        if updates and not self.is_initializing():
            bias.value = routing.updated_bias(bias.value, routed.group_sizes, rate)
        return routed


ROUTER_BIAS = "router_bias"


class MoE(moe_math.MoEOptions, nn.Module):
    """A feed-forward block in which each token uses a few experts out of many. ::

        p = softmax(x . router)              y = sum over the chosen e of  p_e * mlp_e(x)
        mlp_e(x) = activation(x . wi_e) . wo_e

    No token is dropped by default, however many choose the same expert. A token is quantized once,
    for all experts that it chose, and sent to other devices as bytes. The router computes in
    float32, the experts in FP8, each with its own scales. The ``params`` are ``router/kernel``
    ``[in, num_experts]``, ``wi/kernel`` ``[num_experts, in, projections * intermediate_dim]`` (two
    projections side by side for gated activations) and ``wo/kernel``
    ``[num_experts, intermediate_dim, in]``.

    The load-balancing loss (see `moe_math.load_balancing_loss`) is returned if you ask for it,
    and sown as ``load_balancing_loss`` into the collection ``intermediates`` in any case, as are
    ``sequence_balance_loss`` (of sequences along the axis before the last) and ``router_z_loss``.

    With `bias_update_rate` experts are balanced without a loss: the ``k`` largest of ``p_e + b_e``
    are chosen, and each call with a mutable collection ``router_bias`` moves ``b``, f32[experts],
    by ``rate * sign(mean load - load_e)``, from all tokens of the call. Carry the collection on as
    you do ``batch_stats``: ``jfp8.value_and_grad`` does with what the loss function returns as
    mutated. A skipped step leaves ``b`` as it was. Each micro-batch is a step of ``b`` by its own
    loads, and the next one is routed by the result, so divide the rate by their number. Under
    ``jit`` loads are those of the whole batch, however it is sharded, and in ``data_parallel``
    they are added up over devices first: the mean of the collections is that of equal ones. A call
    without the collection raises; a gradient where it is not mutable warns.

    Attributes:
      num_experts: the experts there are.
      intermediate_dim: features between the two products of an expert.
      num_experts_per_token: the experts each token uses.
      activation: see `LayerNormMLP`.
      return_load_balancing_loss: return ``(y, loss)``.
      dtype, param_dtype: see ``flax.linen.Dense``.
      kernel_init: for the kernels of each expert.
      router_init: for the router's kernel.
      saved_activations: see `LayerNormMLP`; of the activation's input.
      recipe, implementation, state_collection: see `jfp8.Dense`.
      expert_axis: axis of the mesh in effect (``jax.set_mesh``) that divides experts, and tokens;
        None, or without a mesh: they are not divided.
      data_axes: axes that divide tokens as well; those that the mesh does not have do not count.
      tensor_axis: axis that divides the kernels of each expert, likewise.
      capacity_factor: an expert gets at most this times its share of the tokens, the first of them;
        the results of the others are 0, and their share of all choices is sown as ``dropped``, next
        to the losses. None drops no token, and every device has room for the tokens of all
        devices along `expert_axis`.
      route: chooses experts: a function of the router's logits, f32[tokens, experts], and `k`, with
        a `bias` if there is one, that returns a `Routing`; such as `jfp8.linen.route` with options,
        ``partial(route, scores="sigmoid", n_group=8, topk_group=4, routed_scaling_factor=2.5)``.
      shared_intermediate_dim: width of an expert that all tokens use, by the layers ``shared_wi``
        and ``shared_wo``; its result is added. None means none.
      bias_update_rate: how far a bias moves in a step, such as 0.001; 0.0: there is a bias, which
        stays as it is; None means no bias.

    Raises:
      ValueError: unknown `activation`; more experts per token than there are; a mesh
        without `expert_axis`, or one that does not divide the experts evenly; a `capacity_factor`
        that is not positive; a negative `bias_update_rate`; no ``router_bias`` although there is a
        bias.

    Warns:
      UserWarning: a gradient is computed, but ``router_bias`` is not mutable; outside ``jax.jit``
        more than 1 % of all choices of experts are dropped.

    References:
      arXiv 2101.03961 (Switch Transformers), arXiv 2401.04088 (Mixtral), arXiv 2211.15841
      (without dropping), arXiv 2412.19437 (DeepSeek-V3: sigmoid), arXiv 2408.15664 (bias).

    >>> import jax, jax.numpy as jnp, jfp8
    >>> from jfp8.layers.linen.moe import MoE
    >>> moe = MoE(num_experts=4, intermediate_dim=16)
    >>> variables = jax.eval_shape(moe.init, jax.random.key(0), jnp.ones((2, 3, 8)))
    >>> {name: layer["kernel"].shape for name, layer in variables["params"].items()}
    {'router': (8, 4), 'wi': (4, 8, 32), 'wo': (4, 16, 8)}
    """

    _: KW_ONLY
    state_collection: StateCollection = "fp8"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Apply the block.

        Args:
          inputs: ``[..., features]``; every leading dimension counts tokens.

        Returns:
          ``[..., features]``; or a pair, see `return_load_balancing_loss`.
        """
        kinds = {nnx_moe.Router: Router, nnx_moe.ExpertDense: ExpertDense, Linear: Dense}
        block = block_in(self, nnx_moe.MoE, kinds, in_features=inputs.shape[-1])
        paths = ["/".join((*self.path, name)) for name in ("wi", "wo")]
        y, sown = block._apply(inputs, recipes_in_effect(self.recipe, paths))
        for name, value in sown.items():
            self.sow("intermediates", name, value)
        return y
