"""One function for each platform that a program may be compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jfp8.tracing.context import Kind, note


def by_platform(
    cuda: Callable[..., jax.Array],
    why: str,
    default: Callable[..., jax.Array],
    *operands: Any,
    rocm: Callable[..., jax.Array] | None = None,
    tpu: Callable[..., jax.Array] | None = None,
    why_on_tpu: str = "",
) -> jax.Array:
    """``cuda(*operands)`` where the program is compiled for CUDA, `default` elsewhere.

    Args:
      cuda: the function for a CUDA compiler.
      why: the reason that `jfp8.report` shows.
      default: the function for other compilers.
      operands: the arguments of either.
      rocm, tpu: the functions for AMD's GPUs and for TPUs; None: `default`.
      why_on_tpu: as `why`, of `tpu`.
    """

    def noted(
        kind: Kind, text: str, function: Callable[..., jax.Array]
    ) -> Callable[..., jax.Array]:
        def call(*operands: Any) -> jax.Array:
            with note(kind, text):
                return function(*operands)

        return call

    branches = {"cuda": noted("cuda", why, cuda)}
    if rocm is not None:
        branches["rocm"] = rocm
    if tpu is not None:
        branches["tpu"] = noted("tpu", why_on_tpu, tpu)
    return lax.platform_dependent(*operands, **branches, default=default)
