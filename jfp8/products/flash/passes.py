"""The two passes of attention as functions with names, by which `jfp8.report` finds its products.

The name lists what the program does not show: the sizes ``[batch, heads, groups, queries, keys,
depth]``, the formats of all operands, and whether later keys are hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jfp8.products.flash import blocks, hopper
from jfp8.products.flash.blocks import Both, Gradients, Softmax
from jfp8.products.flash.implementations import Choice
from jfp8.products.flash.numerics import Numerics, Quantized
from jfp8.products.flash.visible import Visible
from jfp8.products.vjp import PRODUCT_NAME
from jfp8.scaling.formats import FORMATS, Format

Pass = Literal["forward", "backward"]
ATTENTION_NAME = f"{PRODUCT_NAME}attention_"
WIDE = "wide"  # an operand that is not rounded
_SPELLED = {np.dtype(fmt.dtype): fmt.name.lower() for fmt in FORMATS}


class Numbers(NamedTuple):
    """What a pass computes besides its arrays.

    Attributes:
      by: which implementation.
      scale: of the scores.
      dtype: of the results.
      numerics: what the recipe says.
    """

    by: Choice
    scale: float
    dtype: np.dtype
    numerics: Numerics


def forward(
    numbers: Numbers, q: Quantized, k: Quantized, v: Quantized, visible: Visible
) -> Softmax:
    """`blocks.forward` by its name, or what the kernels compute. Formats: Q, K, P, V."""
    formats = (_format(q), _format(k), _spelled(numbers.numerics.weights[0]), _format(v))
    call = _called(_forward, "forward", _sizes(q, k), formats, visible.is_causal)
    return call(numbers, q, k, v, visible)


def _forward(numbers: Numbers, *arrays: Any) -> Softmax:
    by, scale, dtype, numerics = numbers

    def reference(*arrays: Any) -> Softmax:
        found = blocks.forward(*arrays, scale=scale, numerics=numerics)
        return found._replace(out=found.out.astype(dtype))

    return by.forward(reference, *arrays, scale=scale, dtype=dtype)


def backward(
    numbers: Numbers, operands: Both, log_sum: jax.Array, dot: jax.Array, visible: Visible
) -> Gradients:
    """`blocks.backward`, likewise. Formats: dO and V; P and dO; dS and K; dS and Q."""
    q, k, v, g = operands
    weights, scores = numbers.numerics.weights[1], numbers.numerics.scores
    formats = (
        *(_format(g[0]), _format(v[1])),
        *(_spelled(weights), _format(g[1])),
        *(_spelled(scores[0]), _format(k[1])),
        *(_spelled(scores[1]), _format(q[1])),
    )
    call = _called(_backward, "backward", _sizes(q[0], k[0]), formats, visible.is_causal)
    return call(numbers, operands, log_sum, dot, visible)


def _backward(numbers: Numbers, operands: Both, *arrays: Any) -> Gradients:
    by, scale, dtype, numerics = numbers
    by = by.backward or by
    reason = hopper.refusal_backward(numerics, operands.query[0].data.shape[-1])
    if reason is not None:
        by = Choice(None, named=True, reason=by.reason or reason)

    def reference(*arrays: Any) -> Gradients:
        found = blocks.backward(*arrays, scale=scale, numerics=numerics)
        in_dtype = {n: getattr(found, n).astype(dtype) for n in ("query", "key", "value")}
        return found._replace(**in_dtype)

    kernels = partial(hopper.backward, scale=scale, numerics=numerics, dtype=dtype)
    return by(reference, kernels, operands, *arrays)


@functools.cache
def _called(
    run: Callable[..., Any],
    which: Pass,
    sizes: tuple[int, ...],
    formats: tuple[str, ...],
    causal: bool,
) -> Callable[..., Any]:
    def named(*arguments: Any) -> Any:
        return run(*arguments)

    hidden = "causal" if causal else "all"
    named.__name__ = ATTENTION_NAME + "_".join((which, hidden, "x".join(map(str, sizes)), *formats))
    return jax.jit(named, static_argnums=0)


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
