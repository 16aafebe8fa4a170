"""Values that should not be differentiated: a warning while JAX traces a derivative, no code."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jfp8.tracing.caller import user_level

_warned_p = Primitive("warned_if_differentiated")
_warned_p.def_impl(lambda x, **message: x)
_warned_p.def_abstract_eval(lambda x, **message: x)
mlir.register_lowering(_warned_p, lambda context, x, **message: [x])
batching.primitive_batchers[_warned_p] = lambda values, dims, **message: (
    _warned_p.bind(*values, **message),
    dims[0],
)


def warned_if_differentiated(x: jax.Array, message: str) -> jax.Array:
    """Return `x`; a derivative with respect to it, or to what it is made of, warns."""
    return _warned_p.bind(x, message=message)


def _jvp(primals: Any, tangents: Any, *, message: str) -> Any:
    if not isinstance(tangents[0], ad.Zero):
        warnings.warn(message, stacklevel=user_level())
    return _warned_p.bind(*primals, message=message), tangents[0]


ad.primitive_jvps[_warned_p] = _jvp
