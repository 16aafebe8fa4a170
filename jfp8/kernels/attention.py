"""Which implementation computes attention: the reference, kernels that compute the same, cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jfp8.kernels.choice import made_for_this_gpu, why_not_here
from jfp8.kernels.hopper.backend import run
from jfp8.kernels.pallas_attention import BLACKWELL, HOPPER, Pallas
from jfp8.kernels.platforms import by_platform
from jfp8.kernels.xla import cudnn_attention as cudnn
from jfp8.products.flash.mask import Visible
from jfp8.products.flash.numerics import Numerics, numerics_of
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.context import Gpu, note


class Facts(NamedTuple):
    """What the choice depends on; see `scaled_dot_product_attention`.

    Attributes:
      depth: H.
      has_state: whether amax histories are given.
    """

    recipe: Recipe
    visible: Visible
    depth: int
    scale: float
    has_state: bool


class Kernels(NamedTuple):
    """An implementation other than the reference, which computes everything.

    Attributes:
      refusal: why it does not compute something on a GPU, or None.
      forward: computes what `blocks.forward` does.
      run: calls that on CUDA, and is an error elsewhere.
      together: whether all tokens of an operand share a scale. If so, it has to be named.
      gpus: the major compute capability that it is for; None: several.
      refusal_backward: why the reference computes the backward pass of what `refusal` does not
        refuse, or None.
      backward: computes what `blocks.backward` does; None: another one does, see `Choice.backward`.
    """

    refusal: Callable[[Facts, Gpu | None], str | None]
    forward: Callable[..., Any]
    run: Callable[..., Any]
    together: bool = False
    gpus: int | None = None
    refusal_backward: Callable[[Numerics, int], str | None] | None = None
    backward: Callable[..., Any] | None = None


def _by_pallas(kernels: Pallas, capability: int) -> Kernels:
    def refusal(facts: Facts, gpu: Gpu | None) -> str | None:
        numerics = numerics_of(facts.recipe)
        return kernels.refusal(numerics, facts.visible, facts.depth, facts.scale, gpu)

    return Kernels(
        refusal,
        kernels.forward,
        partial(run, name=kernels.name),
        gpus=capability,
        refusal_backward=kernels.refusal_backward,
        backward=kernels.backward,
    )


def _cudnn(facts: Facts, gpu: Gpu | None) -> str | None:
    numerics = numerics_of(facts.recipe)
    return cudnn.refusal(numerics, facts.visible, facts.depth, facts.has_state, gpu)


KERNELS = {
    HOPPER.name: _by_pallas(HOPPER, 9),
    BLACKWELL.name: _by_pallas(BLACKWELL, 10),
    "cudnn": Kernels(_cudnn, cudnn.forward, cudnn.run, together=True),
}


@dataclass(frozen=True)
class Choice:
    """An implementation.

    Attributes:
      kernels: one of `KERNELS`; None: the reference.
      named: whether it was asked for: then nothing else computes.
      backward: of an implementation without a backward pass: what computes that.
      reason: of the reference: why no kernels were chosen.
    """

    kernels: str | None
    named: bool
    backward: Choice | None = None
    reason: str = ""

    @property
    def together(self) -> bool:
        """Whether all tokens of an operand share a scale."""
        return self.kernels is not None and KERNELS[self.kernels].together

    @property
    def both_ways(self) -> bool:
        """Whether kernels compute attention that take operands straight and transposed."""
        return self.kernels is not None and not self.together

    def __call__(
        self, reference: Callable[..., Any], kernels: Callable[..., Any], *operands: Any
    ) -> Any:
        """``kernels(*operands)`` where they are chosen, and the program is compiled for CUDA."""
        by_kernels = lambda *x: same_varying_axes((kernels(*x), x))[0]
        if self.kernels is None:
            with note("cuda", f"bf16: {self.reason}" if self.reason else "emulate"):
                return reference(*operands)
        if not self.named:
            return by_platform(by_kernels, self.kernels, reference, *operands)
        with note("cuda", self.kernels):
            return KERNELS[self.kernels].run(by_kernels, *operands)

    def forward(self, reference: Callable[..., Any], *operands: Any, **how: Any) -> Any:
        """``reference(*operands)``, or what the kernels compute of `operands`, `how` they do it."""
        kernels = None if self.kernels is None else KERNELS[self.kernels].forward
        return self(reference, partial(kernels or reference, **how), *operands)

    def differentiate(
        self, reference: Callable[..., Any], *operands: Any, numerics: Numerics, **how: Any
    ) -> Any:
        """The same of the backward pass; the first of `operands` is a `blocks.Both`."""
        by, kernels = self.backward or self, None
        if by.kernels is not None:
            chosen = KERNELS[by.kernels]
            assert chosen.refusal_backward is not None
            kernels = chosen.backward
            reason = chosen.refusal_backward(numerics, operands[0].query[0].data.shape[-1])
            if reason is not None:
                by = Choice(None, named=True, reason=reason)
        how |= {"numerics": numerics}
        return by(reference, partial(kernels or reference, **how), *operands)


def choose(facts: Facts, implementation: str | None) -> Choice:
    """The implementation that is asked for, or the best one that computes what the reference does.

    Raises:
      ValueError: it is unknown, or does not compute this.
    """
    if implementation == "emulate":
        return Choice(None, named=True)
    if implementation is None:
        causal = [name for name, kernels in KERNELS.items() if not kernels.together]
        candidates = made_for_this_gpu({name: KERNELS[name].gpus for name in causal})
        reasons = {name: _why_not(name, facts, named=False) for name in candidates}
        can = [name for name, reason in reasons.items() if reason is None]
        if can:
            return Choice(can[0], named=False)
        different = dict.fromkeys(filter(None, reasons.values()))
        return Choice(None, named=False, reason="; ".join(different))
    if implementation not in KERNELS:
        allowed = ", ".join(map(repr, ("emulate", *KERNELS)))
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
    backward = choose(facts, None) if KERNELS[implementation].together else None
    return Choice(implementation, named=True, backward=backward)


def _why_not(name: str, facts: Facts, *, named: bool) -> str | None:
    return why_not_here(partial(KERNELS[name].refusal, facts), named=named)
