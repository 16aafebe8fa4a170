"""The loss that `value_and_grad` differentiates: whether a loss scale multiplies it."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Loss(NamedTuple):
    """Hold what is known of a loss while its function is traced.

    Attributes:
      is_scaled: whether it is multiplied by a loss scale afterwards.
      remedy: the call that would multiply it.
    """

    is_scaled: bool
    remedy: str


LOSS = jax.make_user_context(None)
"""Its ``value`` is the `Loss` around, or None in a loop that differentiates by itself."""
