"""The two passes of attention as functions with names, by which `jfp8.report` finds its products.

The name lists what the program does not show: the sizes ``[batch, heads, groups, queries, keys,
depth]``, the formats of all operands, and whether later keys are hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jfp8.products.flash import blocks
from jfp8.products.flash.blocks import Both, Gradients, Softmax
from jfp8.products.flash.numerics import Numerics, Quantized
from jfp8.products.flash.visible import Visible
from jfp8.products.vjp import PRODUCT_NAME
from jfp8.scaling.formats import FORMATS, Format

Pass = Literal["forward", "backward"]
ATTENTION_NAME = f"{PRODUCT_NAME}attention_"
WIDE = "wide"  # an operand that is not rounded
_SPELLED = {np.dtype(fmt.dtype): fmt.name.lower() for fmt in FORMATS}


def forward(
    q: Quantized, k: Quantized, v: Quantized, visible: Visible, scale: float, numerics: Numerics
) -> Softmax:
    """`blocks.forward`, by name. Formats: Q, K, P, V."""
    formats = (_format(q), _format(k), _spelled(numerics.weights[0]), _format(v))
    call = _called("forward", _sizes(q, k), formats, visible.is_causal)
    return call(scale, numerics, q, k, v, visible)


def backward(
    operands: Both,
    log_sum: jax.Array,
    dot: jax.Array,
    visible: Visible,
    scale: float,
    numerics: Numerics,
) -> Gradients:
    """`blocks.backward`, by name. Formats: dO and V; P and dO; dS and K; dS and Q."""
    q, k, v, g = operands
    weights, scores = numerics.weights[1], numerics.scores
    formats = (
        *(_format(g[0]), _format(v[1])),
        *(_spelled(weights), _format(g[1])),
        *(_spelled(scores[0]), _format(k[1])),
        *(_spelled(scores[1]), _format(q[1])),
    )
    call = _called("backward", _sizes(q[0], k[0]), formats, visible.is_causal)
    return call(scale, numerics, operands, log_sum, dot, visible)


@functools.cache
def _called(
    which: Pass, sizes: tuple[int, ...], formats: tuple[str, ...], causal: bool
) -> Callable[..., Any]:
    pass_: Callable[..., Any] = blocks.forward if which == "forward" else blocks.backward

    def run(scale: float, numerics: Numerics, *arrays: Any) -> Any:
        return pass_(*arrays, scale, numerics)

    hidden = "causal" if causal else "all"
    run.__name__ = ATTENTION_NAME + "_".join((which, hidden, "x".join(map(str, sizes)), *formats))
    return jax.jit(run, static_argnums=(0, 1))


def read_name(name: str) -> tuple[str, bool, tuple[int, ...], Sequence[str]]:
    """The pass, whether later keys are hidden, the sizes and the formats that a name lists."""
    which, hidden, sizes, *formats = name.removeprefix(ATTENTION_NAME).split("_")
    return which, hidden == "causal", tuple(map(int, sizes.split("x"))), formats


def _sizes(q: Quantized, k: Quantized) -> tuple[int, ...]:
    *batch, depth = q.data.shape
    return (*batch, k.data.shape[2], depth)


def _format(x: Quantized) -> str:
    return _SPELLED.get(np.dtype(x.data.dtype), WIDE)


def _spelled(fmt: Format | None) -> str:
    return WIDE if fmt is None else fmt.name.lower()
