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
    """What the name of a pass says.

    Attributes:
      which: ``"forward"`` or ``"backward"``.
      is_causal: whether later keys are hidden.
      sizes: ``(batch, heads, groups, queries, keys, depth)``.
      formats: of both operands of each product: Q and K, P and V; or dO and V, P and dO, dS and K,
        dS and Q.
    """

    which: str
    is_causal: bool
    sizes: tuple[int, ...]
    formats: tuple[str, ...]

    @property
    def name(self) -> str:
        """From which `read_name` reads all of it."""
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
    """Of the arguments of `blocks.forward`."""
    formats = _format(q), _format(k), _spelled(numerics.weights[0]), _format(v)
    return Pass("forward", visible.is_causal, _sizes(q, visible), formats)


def backward_pass(operands: Both, visible: Visible, numerics: Numerics) -> Pass:
    """Of the arguments of `blocks.backward`."""
    q, k, v, g = operands
    formats = (
        *(_format(g[0]), _format(v[1])),
        *(_spelled(numerics.weights[1]), _format(g[1])),
        *(_spelled(numerics.scores[0]), _format(k[1])),
        *(_spelled(numerics.scores[1]), _format(q[1])),
    )
    return Pass("backward", visible.is_causal, _sizes(q[0], visible), formats)


@functools.cache
def called(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compute(how, *arrays)`` as a jitted function of this name; `how` is static."""

    def run(how: Any, *arrays: Any) -> Any:
        return compute(how, *arrays)

    run.__name__ = name
    return jax.jit(run, static_argnums=0)


def _sizes(q: Quantized, visible: Visible) -> tuple[int, ...]:
    batch, heads, groups, _, depth = q.data.shape
    return (batch, heads, groups, *visible.sizes, depth)


def _format(x: Quantized) -> str:
    return _SPELLED.get(np.dtype(x.data.dtype), WIDE)


def _spelled(fmt: Format | None) -> str:
    return WIDE if fmt is None else fmt.name.lower()
