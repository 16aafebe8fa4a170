"""Optax's Adam and AdamW, with each moment in about one byte per parameter."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from jfp8.optim.block_storage import Blocks
from jfp8.optim.storage import Float, ScaledFloat16, Storage
from jfp8.optim.stored_state import store_state
from jfp8.scaling.formats import E8M0FNU


class Moments(NamedTuple):
    """The storage of the first moment (``mu``) and of the second (``nu``)."""

    mu: Storage
    nu: Storage


# docs/memory.md, "The moments of Adam", says why: stochastic rounding, so that no moment freezes;
# expanded, so that no small moment vanishes; the second without a sign.
DEFAULT = Moments(
    mu=Blocks(transform="expand", rounding="stochastic"),
    nu=Blocks(E8M0FNU, transform="expand", rounding="stochastic"),
)

PRESETS: dict[str, Moments] = {
    "msamp_o2": Moments(Blocks(block=None, scale_rounding="power_of_two"), ScaledFloat16()),
    "torchao": Moments(Blocks(block=256), Blocks(block=256)),
    "coat": Moments(Blocks(transform="expand"), Blocks(transform="expand")),
}


def scale_by_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    preset: str | None = None,
    mu: Storage | None = None,
    nu: Storage | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return ``optax.scale_by_adam`` with stored moments.

    Args:
      b1, b2, eps, eps_root, nesterov: numbers, or f32[]; as in ``optax.scale_by_adam``.
      mu_dtype, preset, mu, nu, seed: see `adam`.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StoredState`.

    Raises:
      TypeError, ValueError: see `adam`.
    """
    inner = optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)
    return store_state(inner, chosen_moments("scale_by_adam", preset, mu, nu, mu_dtype), seed=seed)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    preset: str | None = None,
    mu: Storage | None = None,
    nu: Storage | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return ``optax.adam`` with its moments in 2.06 bytes per parameter instead of 8. ::

        m = b1 * decode(m') + (1 - b1) * g            v = b2 * decode(v') + (1 - b2) * g^2
        p <- p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        m' <- encode(m)                               v' <- encode(v)

    The update is computed from ``m`` and ``v`` before they are rounded. Arrays of fewer than two
    dimensions or 4096 elements keep f32 moments.

    ============  ===============================  ================================  ========
    `preset`      first moment                     second moment                     bytes
    ============  ===============================  ================================  ========
    None          E4M3 in blocks of 128, expanded  E8M0 in blocks of 128, expanded   2.06
    ``msamp_o2``  E4M3, one power-of-two scale     float16, one power-of-two scale   3.00
    ``torchao``   E4M3 in blocks of 256            E4M3 in blocks of 256             2.03
    ``coat``      E4M3 in blocks of 128, expanded  E4M3 in blocks of 128, expanded   2.06
    ============  ===============================  ================================  ========

    jfp8's own choice (None) rounds stochastically. The presets follow the rules of other libraries
    and round to nearest, but their blocks lie along the last axis instead of the flattened array.
    docs/memory.md compares their updates with exact ones.

    Args:
      learning_rate, b1, b2, eps, eps_root, nesterov: see ``optax.adam``.
      mu_dtype: shorthand for ``mu=Float(mu_dtype)``.
      preset: ``"msamp_o2"``, ``"torchao"``, ``"coat"``, or None for jfp8's own choice.
      mu, nu: how to store the first and second moment, instead of jfp8's choice.
      seed: int or i32[], for stochastic rounding.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StoredState`.

    Raises:
      ValueError: unknown `preset`, or one together with `mu`, `nu` or `mu_dtype`; both `mu` and
        `mu_dtype`; `mu` in a format without a sign.
      TypeError: `mu` or `nu` is not a `Storage`.

    References:
      MS-AMP, ``LBAdam``; torchao, ``AdamFp8``; COAT, arXiv 2410.19313.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> state = jfp8.optim.adam(1e-3).init({"w": jnp.ones((64, 256))})
    >>> sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / (64 * 256)
    2.06298828125
    """
    inner = optax.adam(learning_rate, b1, b2, eps, eps_root, nesterov=nesterov)
    return store_state(inner, chosen_moments("adam", preset, mu, nu, mu_dtype), seed=seed)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    preset: str | None = None,
    mu: Storage | None = None,
    nu: Storage | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return ``optax.adamw`` with stored moments. Weights decay in f32.

    Args:
      learning_rate, b1, b2, eps, eps_root, weight_decay, mask, nesterov: see ``optax.adamw``.
      mu_dtype, preset, mu, nu, seed: see `adam`.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StoredState`.

    Raises:
      TypeError, ValueError: see `adam`.
    """
    inner = optax.adamw(
        learning_rate, b1, b2, eps, eps_root, None, weight_decay, mask, nesterov=nesterov
    )
    return store_state(inner, chosen_moments("adamw", preset, mu, nu, mu_dtype), seed=seed)


def chosen_moments(
    function: str, preset: str | None, mu: Storage | None, nu: Storage | None, mu_dtype: Any
) -> dict[str, Storage]:
    """Return the storages that the arguments of `function` choose."""
    if mu_dtype is not None:
        if mu is not None:
            raise ValueError(
                f"{function}(mu_dtype={mu_dtype!r}, mu={mu!r}) says twice how to store the first "
                "moment. Drop one of the two."
            )
        mu = Float(mu_dtype)
    if isinstance(mu, Blocks) and not mu.fmt.signed:
        raise ValueError(
            f"{function}(mu={mu!r}): {mu.fmt.name} has no sign, but a first moment has one. It can "
            f"store the second moment: {function}(nu={mu!r})."
        )
    if preset is None:
        return Moments(mu or DEFAULT.mu, nu or DEFAULT.nu)._asdict()
    if preset not in PRESETS:
        raise ValueError(
            f"{function}(preset={preset!r}) is unknown. Allowed: {', '.join(map(repr, PRESETS))}, "
            "or None for jfp8's own choice."
        )
    given = {"mu": mu, "nu": nu}
    named = [f"{name}={storage!r}" for name, storage in given.items() if storage is not None]
    if named:
        raise ValueError(
            f"{function}(preset={preset!r}, {', '.join(named)}): a preset chooses both storages. "
            f"Leave preset out, and pass what you want of it: {PRESETS[preset]}."
        )
    return PRESETS[preset]._asdict()
