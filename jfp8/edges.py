"""Finds the layers whose result a model returns, in a jaxpr where layers are marked by name.

Where a function calls a layer it passes what goes in and comes out through `mark_input` and
`mark_output`; `returned_layers` then follows the results of its jaxpr backwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_INPUT, _OUTPUT = "jfp8 input of ", "jfp8 output of "
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
_UNKNOWN = ""  # stands for whatever else a value may depend on


def mark_input(x: Any, path: str) -> Any:
    """`x`, as what goes into the layer at `path`."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _INPUT + path), x)


def mark_output(y: Any, path: str) -> Any:
    """`y`, as what comes out of the layer at `path`."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _OUTPUT + path), y)


def returned_layers(closed: ClosedJaxpr) -> set[str]:
    """The paths of layers with which a result of the function ends.

    Such a layer alone determines the result: no residual, learned scale or other product comes
    after it, and what it gives goes into no other layer.
    """
    jaxpr = closed.jaxpr
    unknown = {_UNKNOWN}
    sources = _Sources()
    outs = sources.of_jaxpr(jaxpr, [unknown for _ in jaxpr.invars])
    ends = {next(iter(found)) for found in outs if len(found) == 1}
    return ends - sources.used - {_UNKNOWN}


class _Sources:
    """For each value, the layers that it comes from since the last product.

    ``{path}`` for this layer alone; with ``_UNKNOWN`` in it also from inputs or parameters; empty
    for constants.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()  # layers whose results go into other layers or products

    def of_jaxpr(self, jaxpr: Jaxpr, ins: list[set[str]]) -> list[set[str]]:
        known: dict[Any, set[str]] = dict(zip(jaxpr.invars, ins, strict=True))
        known.update((v, set()) for v in jaxpr.constvars)
        read = lambda v: set() if isinstance(v, Literal) else known[v]
        for eqn in jaxpr.eqns:
            found = self.of_equation(eqn, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, found, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def of_equation(self, eqn: Any, ins: list[set[str]]) -> list[set[str]]:
        name, mark = eqn.primitive.name, str(eqn.params.get("name", ""))
        outs = len(eqn.outvars)
        together = set().union(*ins)
        if name == "name" and mark.startswith(_OUTPUT):
            return [{mark.removeprefix(_OUTPUT)}]
        if name in _PRODUCTS or (name == "name" and mark.startswith(_INPUT)):
            self.used |= together
            return [{_UNKNOWN}] * outs
        inner = _called(eqn)
        if inner is not None and len(inner.invars) == len(ins):
            return self.of_jaxpr(inner, ins)
        if any(_jaxprs_of(eqn)):  # loops and branches: what is inside is not looked at one by one
            self.used |= together
            for jaxpr in _jaxprs_of(eqn):
                self.of_jaxpr(jaxpr, [together | {_UNKNOWN} for _ in jaxpr.invars])
            return [together | {_UNKNOWN}] * outs
        return [together] * outs


def _called(eqn: Any) -> Jaxpr | None:
    """The jaxpr that the equation calls, once, with its own operands."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    found = list(_jaxprs_of(eqn))
    return found[0] if len(found) == 1 else None


def _jaxprs_of(eqn: Any) -> Iterable[Jaxpr]:
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, Jaxpr):
                yield x
