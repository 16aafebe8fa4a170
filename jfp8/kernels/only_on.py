"""A stand-in for a kernel where that kernel cannot run: it raises when it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jfp8.tracing.compat import same_varying_axes

_refuse_p = Primitive("refuse")
_refuse_p.def_abstract_eval(lambda *, shape, dtype, reason: ShapedArray(shape, dtype))


def _refuse(*context: Any, shape: Any, dtype: Any, reason: str) -> Any:
    raise NotImplementedError(reason)


_refuse_p.def_impl(_refuse)
mlir.register_lowering(_refuse_p, _refuse)


def only_on(platform: str, kernel: Callable[..., Any], reason: str, *operands: Any) -> Any:
    """``kernel(*operands)``, an array or a tree, where the program is compiled for `platform`.

    Raises:
      NotImplementedError: with `reason`, when it is compiled for anything else.
    """
    of = jax.eval_shape(kernel, *operands)

    def there(*operands):
        return same_varying_axes((kernel(*operands), operands))[0]

    def default(*operands):
        refuse = lambda of: _refuse_p.bind(shape=of.shape, dtype=of.dtype, reason=reason)
        return same_varying_axes((jax.tree.map(refuse, of), operands))[0]

    return lax.platform_dependent(*operands, **{platform: there}, default=default)
