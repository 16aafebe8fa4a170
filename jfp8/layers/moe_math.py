"""What the mixtures of experts of Linen and of NNX share."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax import lax

from jfp8.products.ragged import routing
from jfp8.products.ragged.routing import Routing


def expert_kernels(
    init: Initializer, key: jax.Array, num_experts: int, shape: Sequence[int], dtype: Dtype
) -> jax.Array:
    """A kernel for each expert, each with a key of its own: ``[num_experts, *shape]``.

    Args:
      init: makes the kernel of one expert.
      key: is split.
      shape: of the kernel of one expert, ``[in, features]``.
    """
    return jax.vmap(lambda key: init(key, shape, dtype))(jax.random.split(key, num_experts))


def router_logits(tokens: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product in high precision of tokens ``[t, in]`` and kernel ``[in, g]``: f32[t, g]."""
    x, kernel = (a.astype(jnp.float32) for a in (tokens, kernel))
    return jnp.dot(x, kernel, precision=lax.Precision.HIGHEST)


def renormalizes(given: bool | None, experts_per_token: int) -> bool:
    """Whether weights of a token are made to sum to 1; None: if it uses more than one expert."""
    return experts_per_token > 1 if given is None else given


def check_bias_update_rate(rate: float | None) -> None:
    """Raise ``ValueError`` for a rate that would move biases away from balance."""
    if rate is not None and not rate >= 0:
        raise ValueError(
            f"bias_update_rate={rate} must not be negative, which would send more tokens to the "
            "experts that have most. Pass 0.001, 0.0 to keep a bias as it is, or None for no bias."
        )


def losses_of(routed: Routing, input_shape: Sequence[int]) -> dict[str, jax.Array]:
    """The losses of a router by name, f32[] each; see `routing` for the formulas.

    Args:
      input_shape: of what the block was given, ``[..., length, features]``.
    """
    assert routed.logits is not None
    length = max(1, input_shape[-2]) if len(input_shape) > 1 else 1
    return {
        "load_balancing_loss": routing.load_balancing_loss(routed),
        "sequence_balance_loss": routing.sequence_balance_loss(routed, length),
        "router_z_loss": routing.router_z_loss(routed.logits),
    }
