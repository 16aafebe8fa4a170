"""Functions that the mixtures of experts of Linen and NNX share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax import lax
from jax.sharding import PartitionSpec

from jfp8.layers import transformer_math
from jfp8.layers.site import Multiplies
from jfp8.matmul.spec import Implementation
from jfp8.products.ragged.dot import observed_ragged_dot
from jfp8.products.ragged.expert_rows import ExpertRows
from jfp8.products.ragged.experts import observed_expert_dot, plain_expert_dot
from jfp8.products.ragged.routing import Routing, largest, route
from jfp8.recipes.registry import RecipeLike
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import Format
from jfp8.tracing.caller import user_level
from jfp8.tracing.shardings import sharded_like

Route = Callable[..., Routing]  # takes logits and k, and maybe a bias


# Modules inherit from this class, see `jfp8.layers.transformer_options`.
@dataclass(eq=False, repr=False)
class MoEOptions:
    """All options of a mixture of experts; see `jfp8.linen.MoE`."""

    num_experts: int
    intermediate_dim: int
    num_experts_per_token: int = 2
    activation: str | transformer_math.ClampedSwiglu = "swiglu"
    return_load_balancing_loss: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = jax.nn.initializers.lecun_normal()
    router_init: Initializer = jax.nn.initializers.lecun_normal()
    saved_activations: Format | None = None
    recipe: RecipeLike | None = None
    implementation: Implementation = None
    _: KW_ONLY
    expert_axis: str | None = None
    data_axes: tuple[str, ...] = ("data", "fsdp")
    tensor_axis: str | None = "tensor"
    capacity_factor: float | None = None
    route: Route = route
    shared_intermediate_dim: int | None = None
    bias_update_rate: float | None = None


def expert_kernels(
    key: jax.Array, init: Initializer, num_experts: int, shape: Sequence[int], dtype: Dtype
) -> jax.Array:
    """Return a kernel for each expert, each with its own key: ``[num_experts, *shape]``."""
    kernels = jax.vmap(lambda key: init(key, shape, dtype))(jax.random.split(key, num_experts))
    # Where the initializer says how kernels are partitioned, over experts they are not.
    return nn.meta.add_axis(kernels, 0, {nn.meta.PARTITION_NAME: None})


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


def router_logits(tokens: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product in high precision of tokens ``[t, in]`` and kernel ``[in, g]``: f32[t, g]."""
    x, kernel = (a.astype(jnp.float32) for a in (tokens, kernel))
    return sharded_like(tokens, partial(jnp.dot, precision=lax.Precision.HIGHEST), x, kernel)


def routed_by(route: Route, k: int, logits: jax.Array, **bias: jax.Array) -> Routing:
    """Return ``route(logits, k)`` or, if there is a bias, ``route(logits, k, bias=bias)``."""
    return sharded_like(logits, lambda logits, bias: route(logits, k, **bias), logits, bias)


def check_bias_update_rate(rate: float | None) -> None:
    """Raise ``ValueError`` for a rate that would move biases away from balance."""
    if rate is not None and not rate >= 0:
        raise ValueError(
            f"bias_update_rate={rate} must not be negative, which would send more tokens to the "
            "experts that have most. Pass 0.001, 0.0 to keep a bias as it is, or None for no bias."
        )


def load_balancing_loss(routing: Routing) -> jax.Array:
    """Measure how unevenly tokens go to the experts: ``g * sum_i f_i P_i``, f32[].

    ``f_i`` is the fraction of all choices that fell on expert ``i`` and ``P_i`` the mean of its
    probabilities, through which alone there is a gradient. It is 1 if both are equal for all
    experts, and at most ``g``. Add a small multiple of it to the loss, such as 0.01 times.

    References:
      Switch Transformers, arXiv 2101.03961, equations 4 to 6, for one choice per token.
    """
    groups = routing.probabilities.shape[1]
    f = routing.group_sizes / routing.experts.size
    p = jnp.mean(routing.probabilities, axis=0)
    return groups * jnp.sum(f * p)


def sequence_balance_loss(routing: Routing, sequence_length: int) -> jax.Array:
    """Measure how unevenly tokens of a sequence go to experts, f32[]; the mean over sequences.

    ::

        loss = sum_i f_i P_i      f_i = g / (k T) * count of tokens with s_i among their k largest
                                  P_i = mean over the sequence of s_i / sum_j s_j

    A sequence has ``T`` tokens, `sequence_length`, and the routed ones are whole sequences. Choices
    are counted as the scores alone would make them, without a bias. The gradient goes through
    ``P_i``. It is 1 if all is even. DeepSeek-V3 adds 0.0001 times it, next to a bias (see
    `updated_bias`).

    References:
      DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
    """
    tokens, groups = routing.probabilities.shape
    if sequence_length < 1 or tokens % sequence_length:
        raise ValueError(
            f"sequence_length={sequence_length} must divide the {tokens} tokens that were routed, "
            "since the loss is one of whole sequences. Pass the length of one sequence."
        )
    k = routing.experts.shape[1]
    p = routing.probabilities.reshape(tokens // sequence_length, sequence_length, groups)
    f = groups / k * jnp.mean(jnp.sum(largest(p, k), axis=-2), axis=1)
    losses = jnp.sum(f * jnp.mean(p, axis=1), axis=-1)
    return jnp.sum(losses) / max(len(losses), 1)


def router_z_loss(logits: jax.Array) -> jax.Array:
    """``mean over tokens of log(sum_i exp logits_i)^2``, f32[]: keeps the router's logits small.

    References:
      ST-MoE, arXiv 2202.08906, equation 5, which adds 0.001 times it to the loss.
    """
    z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return jnp.sum(z**2) / max(len(z), 1)


def losses_of(routed: Routing, input_shape: Sequence[int]) -> dict[str, jax.Array]:
    """Return the losses of a router by name, for inputs ``[..., length, features]``."""
    length = max(1, input_shape[-2]) if len(input_shape) > 1 else 1

    def losses(routed: Routing) -> dict[str, jax.Array]:
        assert routed.logits is not None
        return {
            "load_balancing_loss": load_balancing_loss(routed),
            "sequence_balance_loss": sequence_balance_loss(routed, length),
            "router_z_loss": router_z_loss(routed.logits),
        }

    return sharded_like(PartitionSpec(), losses, routed)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def warned_if_trained(message: str, x: jax.Array) -> jax.Array:
    """Return `x`; a derivative with respect to it warns."""
    return x


@warned_if_trained.defjvp
def _warned(message: str, primals: Any, tangents: Any) -> Any:
    warnings.warn(message, stacklevel=user_level())
    return primals[0], tangents[0]


def warn_if_many(dropped: jax.Array, capacity_factor: float) -> None:
    """Warn if more than 1 % of all choices are dropped, where the share is known: outside `jit`."""
    if not isinstance(dropped, jax.core.Tracer) and float(dropped) > 0.01:
        warnings.warn(
            f"capacity_factor={capacity_factor} drops {float(dropped):.1%} of the choices of "
            "experts, whose results are 0. Pass a larger one, or balance the experts: add the sown "
            "load_balancing_loss to the loss, or pass bias_update_rate. Under jax.jit, watch the "
            "sown value 'dropped'.",
            UserWarning,
            stacklevel=user_level(),
        )
