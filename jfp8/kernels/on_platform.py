"""Operations computed in one way on one platform, and by a reference on all others.

The device is known while a program is traced, so a program contains that device's computation and
nothing else. If it is nevertheless compiled for another platform, such as the host's CPU, it runs
the reference, which is traced only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from jfp8.tracing.compat import kernels_are_interpreted, same_varying_axes
from jfp8.tracing.device import platform_of
from jfp8.tracing.notes import note


class _OnPlatform(Primitive):
    """Bind the leaves of operands, the jaxpr for a platform, and a function of the leaves."""

    multiple_results = True


_on_platform_p = _OnPlatform("jfp8_on_platform")
_on_platform_p.def_abstract_eval(lambda *_, program, **params: program.out_avals)


@_on_platform_p.def_impl
def _evaluate(*leaves: Any, platform: str, program: Any, elsewhere: Any) -> Any:
    is_there = platform_of(leaves) == {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    return (jaxpr_as_fun(program) if is_there else elsewhere)(*leaves)


def _lower(
    here: str, context: Any, *leaves: Any, platform: str, program: Any, elsewhere: Any
) -> Any:
    function = jaxpr_as_fun(program) if platform == here else elsewhere
    return mlir.lower_fun(function, multiple_results=True)(context, *leaves)


mlir.register_lowering(_on_platform_p, partial(_lower, ""))
for _platform in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_on_platform_p, partial(_lower, _platform), platform=_platform)


def _batch(
    leaves: Sequence[Any], dims: Sequence[Any], *, platform: str, program: Any, elsewhere: Any
) -> tuple[Any, Sequence[int]]:
    """Map both programs over the leading axis of batched operands and of all results."""
    over = lambda function: jax.vmap(function, in_axes=tuple(dims))
    found, _ = _bind(platform, over(jaxpr_as_fun(program)), over(elsewhere), leaves)
    return found, (0,) * len(found)


batching.primitive_batchers[_on_platform_p] = _batch


def _bind(
    platform: str, compute: Callable[..., Any], elsewhere: Callable[..., Any], leaves: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of ``compute(*leaves)``.

    Arrays that `compute` closes over become operands, too.
    """
    traced, shapes = jax.make_jaxpr(compute, return_shape=True)(*leaves)
    n = len(traced.consts)
    if n:
        body = lambda *given: jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, given[:n]))(*given[n:])
        consts, traced = traced.consts, jax.make_jaxpr(body)(*traced.consts, *leaves)
        leaves, elsewhere = [*consts, *leaves], lambda *given, f=elsewhere: f(*given[n:])
    found = _on_platform_p.bind(*leaves, platform=platform, program=traced, elsewhere=elsewhere)
    return found, jax.tree.structure(shapes)


def on_platform(
    platform: str, compute: Callable[..., Any], elsewhere: Callable[..., Any] | str, *operands: Any
) -> Any:
    """Return ``compute(*operands)``, an array or a tree, if the program is for `platform`.

    `elsewhere` computes the same on any other platform, and closes over no arrays; or it is an
    implementation that is not for others: compiling raises ``NotImplementedError`` there.
    Interpreted kernels run anywhere.
    """
    if kernels_are_interpreted():
        return compute(*operands)
    leaves, tree = jax.tree.flatten(operands)

    def of_leaves(function: Callable[..., Any], *leaves: Any) -> Any:
        operands = tree.unflatten(leaves)
        return same_varying_axes((function(*operands), operands))[0]

    def otherwise(*leaves: Any) -> list[Any]:
        if isinstance(elsewhere, str):
            where = {"cuda": "CUDA", "tpu": "TPUs"}[platform]
            raise NotImplementedError(
                f"implementation={elsewhere!r} runs on {where}, and this program is compiled for "
                "another platform. Use implementation=None or 'emulate', which compute the same."
            )
        return jax.tree.leaves(of_leaves(elsewhere, *leaves))

    found, structure = _bind(platform, partial(of_leaves, compute), otherwise, leaves)
    return structure.unflatten(found)


def on_cuda(
    compute: Callable[..., Any], reference: Callable[..., Any], *operands: Any, why: str = ""
) -> Any:
    """Return ``compute(*operands)``, computed by a CUDA GPU; `jfp8.report` shows `why`.

    If kernels are interpreted, on any device, it returns the result of `reference`.
    """
    with note("cuda", why):
        if kernels_are_interpreted():
            return reference(*operands)
        return on_platform("cuda", compute, reference, *operands)
