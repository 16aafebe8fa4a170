"""Operations of a program that can be compiled for one platform only, and say so elsewhere.

The device is known while a program is traced, so a program holds what that device computes and
nothing else. If it is compiled for another platform all the same, it must not fail far away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jfp8.tracing.compat import kernels_are_interpreted, same_varying_axes
from jfp8.tracing.notes import note

_only_on_p = Primitive("jfp8_only_on")
_only_on_p.def_impl(lambda x, **params: jax.jit(partial(_only_on_p.bind, **params))(x))
_only_on_p.def_abstract_eval(lambda x, **params: x)
batching.primitive_batchers[_only_on_p] = lambda values, dims, **params: (
    _only_on_p.bind(*values, **params),
    dims[0],
)


def _refuse(*context: Any, platform: str, reason: str) -> Any:
    raise NotImplementedError(reason)


def _pass(here: str, context: Any, x: Any, *, platform: str, reason: str) -> Any:
    del context
    if platform != here:
        raise NotImplementedError(reason)
    return [x]


mlir.register_lowering(_only_on_p, _refuse)
for _platform in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_only_on_p, partial(_pass, _platform), platform=_platform)


def only_on(platform: str, kernel: Callable[..., Any], reason: str, *operands: Any) -> Any:
    """Return ``kernel(*operands)``, an array or a tree, of a program that is for `platform`.

    Interpreted kernels run anywhere.

    Raises:
      NotImplementedError: with `reason`, when the program is compiled for anything else.
    """
    if kernels_are_interpreted():
        return kernel(*operands)
    leaves, tree = jax.tree.flatten(operands)
    leaves[0] = _only_on_p.bind(leaves[0], platform=platform, reason=reason)
    return same_varying_axes((kernel(*tree.unflatten(leaves)), operands))[0]


def traced_for(platform: str, what: str) -> str:
    """Return the reason for `only_on` where the device was chosen, not an implementation."""
    return (
        f"{what} runs on {platform.upper()} only, and this program, which was traced for it, is "
        "compiled for another platform. Trace it for that one: inside jax.default_device(device), "
        "or, for jax.export, inside jfp8.for_platforms(...). An implementation= that was named "
        "has to be left out there."
    )


def on_cuda(
    compute: Callable[..., Any], reference: Callable[..., Any], *operands: Any, why: str = ""
) -> Any:
    """Return ``compute(*operands)``, what a CUDA GPU computes; `jfp8.report` shows `why`.

    Where kernels are interpreted, on whatever device there is, it is what `reference` computes.
    """
    with note("cuda", why):
        if kernels_are_interpreted():
            return reference(*operands)
        reason = traced_for("cuda", f"A product by {why.partition(':')[0]!r}")
        return only_on("cuda", compute, reason, *operands)
