"""Say how devices may divide attention: by sequences and heads, ``[B, N, T, H]``.

Rules for `partitioning.divided`, with as many dimensions, and with those of `key_lengths` and
`mask` that are not None.
"""

from __future__ import annotations

import jax

from jfp8.kernels.flash.operands import Stored


def forward_rule(
    groups: int, *, key_lengths: jax.Array | None = None, mask: jax.Array | None = None
) -> str:
    """Return the rule of `attention_forward`."""
    k = _of_keys(groups)
    matrices, scales = ["b n T H", f"{k} S H", f"{k} H S"], ["b n T", f"{k} S", f"{k} S"]
    operands = [*matrices, *scales, *_of_hidden(groups, key_lengths, mask)]
    return f"{', '.join(operands)} -> b n T H, b n T"


def backward_rule(
    groups: int, *, key_lengths: jax.Array | None = None, mask: jax.Array | None = None
) -> str:
    """Return the rule of `attention_backward`, with the leaves of its operands."""
    q, k = "b n", _of_keys(groups)
    tokens = [f"{k} S" if name[0] in "kv" else f"{q} T" for name in Stored._fields]
    matrices = [
        f"{axes[:-1]}H {axes[-1]}" if name.endswith("_t") else f"{axes} H"
        for name, axes in zip(Stored._fields, tokens, strict=True)
    ]
    operands = [*matrices, *tokens, f"{q} T", f"{q} T", *_of_hidden(groups, key_lengths, mask)]
    return f"{', '.join(operands)} -> {q} T H, {k} S H, {k} S H, {q} T"


def _of_keys(groups: int) -> str:
    """Return the names of the heads of keys."""
    return "b n" if groups == 1 else f"b n/{groups}"


def _of_hidden(groups: int, key_lengths: jax.Array | None, mask: jax.Array | None) -> list[str]:
    """Return the names of the dimensions of all that hides keys. Every device has those of 1."""
    names = [] if key_lengths is None else [_of_keys(groups)]
    if mask is not None:
        each = zip("bnTS", ("B", "N", "Q", "K"), mask.shape, strict=True)
        names.append(" ".join(name if size > 1 else one for name, one, size in each))
    return names
