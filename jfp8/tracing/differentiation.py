"""Values that should not be differentiated: a warning while JAX traces a derivative, no code."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jfp8.tracing.caller import user_level

_warned_p = Primitive("warned_if_differentiated")
_warned_p.def_impl(lambda x, *others, **message: x)
_warned_p.def_abstract_eval(lambda x, *others, **message: x)
mlir.register_lowering(_warned_p, lambda context, x, *others, **message: [x])
batching.primitive_batchers[_warned_p] = lambda values, dims, **message: (
    _warned_p.bind(*values, **message),
    dims[0],
)


def warned_if_differentiated(x: jax.Array, message: str, *others: jax.Array) -> jax.Array:
    """Return `x`; a derivative with respect to it, or to what it is made of, warns.

    If there are `others`, a derivative with respect to one of them, but not to `x`, warns instead.
    """
    return _warned_p.bind(x, *others, message=message)


def _jvp(primals: Any, tangents: Any, *, message: str) -> Any:
    first, *others = (not isinstance(tangent, ad.Zero) for tangent in tangents)
    if (any(others) and not first) if others else first:
        warnings.warn(message, stacklevel=user_level())
    return _warned_p.bind(*primals, message=message), tangents[0]


ad.primitive_jvps[_warned_p] = _jvp
