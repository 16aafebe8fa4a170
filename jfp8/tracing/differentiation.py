"""Values that should not be differentiated: a warning while JAX traces a derivative, no code."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jfp8.tracing.caller import user_level

_warned_p = Primitive("warned_if_differentiated")
_warned_p.def_impl(lambda x, *unless, **message: x)
_warned_p.def_abstract_eval(lambda x, *unless, **message: x)
mlir.register_lowering(_warned_p, lambda context, x, *unless, **message: [x])
batching.primitive_batchers[_warned_p] = lambda values, dims, **message: (
    _warned_p.bind(*values, **message),
    dims[0],
)


def warned_if_differentiated(x: jax.Array, message: str, *unless: jax.Array) -> jax.Array:
    """Return `x`; a derivative by it, or by what it is made of, warns.

    But for a derivative by one of `unless`, too.
    """
    return _warned_p.bind(x, *unless, message=message)


def _jvp(primals: Any, tangents: Any, *, message: str) -> Any:
    x, *unless = (not isinstance(tangent, ad.Zero) for tangent in tangents)
    if x and not any(unless):
        warnings.warn(message, stacklevel=user_level())
    return _warned_p.bind(*primals, message=message), tangents[0]


ad.primitive_jvps[_warned_p] = _jvp
