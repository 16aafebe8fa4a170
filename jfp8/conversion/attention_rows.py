"""Report the matmuls of attention in FP8: two forward, four backward.

They run in loops over blocks, whose number of iterations the program does not tell, so they are
read from the name of their pass (see `products.flash.passes`). FLOPs count whole arrays of scores
once, as for attention in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from jfp8.conversion.flops import microseconds
from jfp8.conversion.product_rows import ProductRow
from jfp8.products.flash.passes import ATTENTION_NAME, WIDE, read_name

_ON_CUDA = "bf16: attention in FP8 has no kernel"


def is_attention(eqn: Any) -> bool:
    """Tell whether `eqn` is a pass of attention in FP8."""
    return str(eqn.params.get("name", "")).startswith(ATTENTION_NAME)


def attention_rows(eqn: Any, notes: dict[str, str], times: int) -> Iterator[ProductRow]:
    """Return the rows of a pass of attention; for `times` see `ProductRow`."""
    which, _, sizes, formats = read_name(eqn.params["name"])
    batch, heads, groups, queries, keys, depth = sizes
    by_query, by_key = (batch, heads, groups, queries, depth), (batch, heads, keys, depth)
    by_score = (batch, heads, groups, queries, keys)
    products = {
        "forward": [("fprop", by_query, by_key, by_score), ("fprop", by_score, by_key, by_query)],
        "backward": [
            ("dgrad", by_query, by_key, by_score),  # dP = dO V^T
            ("wgrad", by_score, by_query, by_key),  # dV = P^T dO
            ("dgrad", by_score, by_key, by_query),  # dQ = dS K
            ("wgrad", by_score, by_query, by_key),  # dK = dS^T Q
        ],
    }[which]
    # Axes that vmap and the like stack are in the result, O or dQ, and not in the name.
    repeated = max(v.aval.size for v in eqn.outvars) // math.prod(by_query) or 1
    flops = 2 * repeated * math.prod(by_score) * depth
    spelled = lambda fmt, x: f"{'f32' if fmt == WIDE else fmt}[{','.join(map(str, x))}]"
    for (kind, lhs, rhs, out), *operands in zip(products, formats[::2], formats[1::2], strict=True):
        narrow = WIDE not in operands
        elements = repeated * sum(map(math.prod, (lhs, rhs, out)))
        yield ProductRow(
            path=notes.get("path", ""),
            layer=notes.get("layer", ""),
            kind=kind if narrow else "forward" if which == "forward" else "backward",
            lhs=spelled(operands[0], lhs),
            rhs=spelled(operands[1], rhs),
            out=spelled(WIDE, out),
            fp8=narrow,
            recipe=notes.get("recipe", "") if narrow else "",
            implementation="bf16" if jax.default_backend() == "gpu" else "emulate",
            cuda=_ON_CUDA,
            reason="" if narrow else "the recipe keeps an operand in high precision",
            times=times,
            flops=times * flops,
            **microseconds(flops, elements, "rounded" if narrow else "bf16", "rows"),
        )
