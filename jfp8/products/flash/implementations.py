"""Which implementation computes attention: the reference, or kernels that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jfp8.matmul.choice import by_platform, why_not_here
from jfp8.matmul.hopper.product import run
from jfp8.products.flash import hopper
from jfp8.products.flash.numerics import numerics_of
from jfp8.products.flash.visible import Visible
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.context import Gpu, note


class Facts(NamedTuple):
    """What the choice depends on; see `scaled_dot_product_attention`.

    Attributes:
      depth: H.
    """

    recipe: Recipe
    visible: Visible
    depth: int
    scale: float


def _mosaic_gpu(facts: Facts, gpu: Gpu | None) -> str | None:
    numerics = numerics_of(facts.recipe)
    return hopper.refusal(numerics, facts.visible, facts.depth, facts.scale, gpu)


# Why each does not compute something on a GPU, or None; but for the reference, which always does.
REFUSALS: dict[str, Callable[[Facts, Gpu | None], str | None]] = {"mosaic_gpu": _mosaic_gpu}
UNASKED = ("mosaic_gpu",)  # those that compute what the reference does


@dataclass(frozen=True)
class Choice:
    """An implementation.

    Attributes:
      kernels: one of `REFUSALS`; None: the reference.
      named: whether it was asked for: then nothing else computes.
    """

    kernels: str | None
    named: bool

    def __call__(
        self, reference: Callable[..., Any], kernels: Callable[..., Any], *operands: Any
    ) -> Any:
        """``kernels(*operands)`` where they are chosen, and the program is compiled for CUDA."""
        by_kernels = lambda *x: same_varying_axes((kernels(*x), x))[0]
        if self.kernels is None:
            return reference(*operands)
        if not self.named:
            return by_platform(by_kernels, self.kernels, reference, *operands)
        with note("cuda", self.kernels):
            return run(by_kernels, *operands)


def choose(facts: Facts, implementation: str | None) -> Choice:
    """The implementation that is asked for, or the best one that computes what the reference does.

    Raises:
      ValueError: it is unknown, or does not compute this.
    """
    if implementation == "emulate":
        return Choice(None, named=True)
    if implementation is None:
        can = (name for name in UNASKED if _why_not(name, facts, named=False) is None)
        return Choice(next(can, None), named=False)
    if implementation not in REFUSALS:
        allowed = ", ".join(map(repr, ("emulate", *REFUSALS)))
        raise ValueError(
            f"implementation={implementation!r} is unknown. Allowed: {allowed}, or None, which "
            "picks one for the platform."
        )
    reason = _why_not(implementation, facts, named=True)
    if reason is not None:
        raise ValueError(
            f"implementation={implementation!r} does not support {reason}. "
            "Use implementation=None or 'emulate'."
        )
    return Choice(implementation, named=True)


def _why_not(name: str, facts: Facts, *, named: bool) -> str | None:
    return why_not_here(partial(REFUSALS[name], facts), named=named)
