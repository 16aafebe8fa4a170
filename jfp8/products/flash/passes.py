"""The names of the two passes of attention, by which `jfp8.report` finds its products.

A name lists what the program does not show: the sizes ``[batch, heads, groups, queries, keys,
depth]``, the formats of all operands, and whether later keys are hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jfp8.products.flash.blocks import Both
from jfp8.products.flash.mask import Visible
from jfp8.products.flash.numerics import Numerics, Quantized
from jfp8.products.vjp import PRODUCT_NAME
from jfp8.scaling.formats import FORMATS, Format

ATTENTION_NAME = f"{PRODUCT_NAME}attention_"
WIDE = "wide"  # an operand that is not rounded
_SPELLED = {np.dtype(fmt.dtype): fmt.name.lower() for fmt in FORMATS}


class Pass(NamedTuple):
    """A pass, as its name describes it.

    The formats are of both operands of each product: Q and K, P and V; or dO and V, P and dO, dS
    and K, dS and Q.
    """

    which: str  # "forward" or "backward"
    is_causal: bool
    sizes: tuple[int, ...]  # batch, heads, groups, queries, keys, depth
    formats: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name, from which `read_name` restores this pass."""
        hidden = "causal" if self.is_causal else "all"
        sizes = "x".join(map(str, self.sizes))
        return ATTENTION_NAME + "_".join((self.which, hidden, sizes, *self.formats))


def read_name(name: str) -> Pass:
    """Return the pass with this name."""
    which, hidden, sizes, *formats = name.removeprefix(ATTENTION_NAME).split("_")
    return Pass(which, hidden == "causal", tuple(map(int, sizes.split("x"))), tuple(formats))


def forward_pass(
    q: Quantized, k: Quantized, v: Quantized, visible: Visible, numerics: Numerics
) -> Pass:
    """Describe the arguments of `blocks.forward`."""
    return _pass("forward", q, visible, q, k, numerics.weights[0], v)


def backward_pass(operands: Both, visible: Visible, numerics: Numerics) -> Pass:
    """Describe the arguments of `blocks.backward`."""
    (q, q_2), (_, k), (_, v), (grad, grad_2) = operands
    (_, weights), (for_dq, for_dk) = numerics.weights, numerics.scores
    return _pass("backward", q, visible, grad, v, weights, grad_2, for_dq, k, for_dk, q_2)


def _pass(which: str, q: Quantized, visible: Visible, *operands: Quantized | Format | None) -> Pass:
    batch, heads, groups, _, depth = q.data.shape
    sizes = batch, heads, groups, *visible.sizes, depth
    return Pass(which, visible.is_causal, sizes, tuple(map(_spelled, operands)))


@functools.cache
def called(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compute(how, *arrays)`` as a jitted function of this name; `how` is static."""

    def run(how: Any, *arrays: Any) -> Any:
        return compute(how, *arrays)

    run.__name__ = name
    return jax.jit(run, static_argnums=0)


def _spelled(operand: Quantized | Format | None) -> str:
    if isinstance(operand, Quantized):
        return _SPELLED.get(np.dtype(operand.data.dtype), WIDE)
    return WIDE if operand is None else operand.name.lower()
