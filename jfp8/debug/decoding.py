"""Compare the probabilities of decoding, or of another engine, with training's."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class DecodingMismatch:
    """Result of `mismatch`: all 0 if training and decoding are bitwise identical.

    Attributes:
      tokens: number of tokens that were compared.
      mean, p99, max: mean, 99th percentile and maximum of ``|d|``, in nats.
      kl: ``mean(-d)``, the plain estimate of the Kullback-Leibler divergence; it may be negative.
      k3: ``mean(exp(d) - 1 - d)``, an estimate with less noise; never negative.
      probability_mean, probability_max: mean and maximum of ``|p_train - p_decode|``.
    """

    tokens: int
    mean: float
    p99: float
    max: float
    kl: float
    k3: float
    probability_mean: float
    probability_max: float

    def __str__(self) -> str:
        return (
            f"|log p| differs by {self.mean:.2g} on average, {self.p99:.2g} at the 99th percentile "
            f"and at most {self.max:.2g} ({self.tokens:,} tokens). "
            f"KL(decode || train): {self.kl:.2g}, k3 {self.k3:.2g}. "
            f"Probabilities differ by {self.probability_mean:.2g} on average, at most "
            f"{self.probability_max:.2g}."
        )


def mismatch(
    train: jax.typing.ArrayLike,
    decode: jax.typing.ArrayLike,
    mask: jax.typing.ArrayLike | None = None,
) -> DecodingMismatch:
    """Compare training and decoding by the log-probabilities of sampled tokens. ::

        d  = log p_train(token) - log p_decode(token)
        kl = mean(-d)                 k3 = mean(exp(d) - 1 - d)

    Both estimate ``KL(p_decode || p_train)`` if decoding drew the tokens, as the rollouts of
    reinforcement learning do, where training takes ``d`` to be 0.

    Args:
      train: f32 array of any shape, log-probabilities of the tokens from one pass over the whole
        sequence, in nats:
        ``jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]``.
      decode: f32 array like `train`, from decoding step by step, or from another engine with the
        exported weights.
      mask: bool array of this shape, True or 1 where a token counts; None counts all.

    Returns:
      A `DecodingMismatch`, computed in f64.

    Raises:
      ValueError: other shapes; no token counts; values that are no log-probabilities.

    References:
      John Schulman, "Approximating KL Divergence" (k1 and k3); verl's documentation, "Rollout
      Correction", reports them as ``rollout_corr/kl`` and ``rollout_corr/k3_kl``.

    >>> import jax.numpy as jnp, jfp8
    >>> train, decode = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.5, 0.25]))
    >>> found = jfp8.debug.mismatch(train, decode)
    >>> round(found.max, 3), round(found.k3, 4), round(found.probability_max, 3)
    (0.223, 0.0116, 0.05)
    """
    one, other = np.asarray(train, np.float64), np.asarray(decode, np.float64)
    counts = np.ones(one.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if not one.shape == other.shape == counts.shape:
        raise ValueError(
            f"train, decode and mask must have one shape, one number for each token; got "
            f"{one.shape}, {other.shape} and {counts.shape}."
        )
    one, other = one[counts], other[counts]
    if not one.size:
        raise ValueError("No token is left to compare: the arrays are empty, or the mask is False.")
    for name, x in (("train", one), ("decode", other)):
        if not np.all(x <= 1e-3):
            raise ValueError(
                f"{name} has the value {x[~(x <= 1e-3)][0]:g}, which is no log-probability. Pass "
                "those of the tokens, jax.nn.log_softmax(logits) at tokens, not logits or "
                "probabilities."
            )
    d = one - other
    size = np.abs(d)
    probability = np.abs(np.exp(one) - np.exp(other))
    return DecodingMismatch(
        tokens=d.size,
        mean=float(size.mean()),
        p99=float(np.percentile(size, 99)),
        max=float(size.max()),
        kl=float(-d.mean()),
        k3=float(np.mean(np.expm1(d) - d)),
        probability_mean=float(probability.mean()),
        probability_max=float(probability.max()),
    )
