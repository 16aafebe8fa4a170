"""Warn of a conversion that changed nothing, and say why each layer stayed as it was."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jfp8.conversion.selection import Decision
from jfp8.tracing.caller import user_level

_LISTED = 4  # models of a kind
_INSTEAD = {
    "linen": "jfp8.linen.DotGeneral or EinsumProduct, and leave the derivative to JAX.",
    "nnx": "jfp8.nnx.DotGeneral or jfp8.nnx.EinsumOp, and leave the derivative to JAX.",
}


def warn_of_nothing(
    model: Any,
    api: Literal["linen", "nnx"],
    stayed: Mapping[str, tuple[type, Decision]],
    own: Mapping[str, tuple[type, dict[str, tuple[int, ...]]]],
) -> bool:
    """Warn that no product of `model` is FP8, unless the user asked for that; tell if it warned.

    `stayed` are the layers that kept their own product, with why; for `own` see `own_parameters`.
    """
    if any(decision.chosen for _, decision in stayed.values()):
        return False
    said = []
    if stayed:
        layers = [f"{_named(path, kind)}: {why.reason}" for path, (kind, why) in stayed.items()]
        edges = any(decision.reason.startswith("exempt: ") for _, decision in stayed.values())
        cure = " exempt=() exempts none." if edges else ""
        said.append(f"Layers that it left as they are, and why: {_listed(layers)}.{cure}")
    else:
        said.append("The model has no layer of Flax with a product, such as nn.Dense.")
    if own:
        spelled = lambda own: ", ".join(f"{name!r} {shape}" for name, shape in own.items())
        modules = [f"{_named(path, kind)}, {spelled(own)}" for path, (kind, own) in own.items()]
        said.append(
            "Modules that hold parameters, but multiply by none of them where that can be seen: "
            f"{_listed(modules)}. Inside functions with derivatives of their own "
            f"(jax.custom_vjp) it cannot: use {_INSTEAD[api]}"
        )
    warnings.warn(
        f"No product of {type(model).__name__} is FP8: jfp8.convert changed nothing. "
        f"{' '.join(said)} jfp8.report lists every product.",
        UserWarning,
        stacklevel=user_level(),
    )
    return True


def bridged_message(bridged: Mapping[str, type]) -> str:
    """Say that NNX modules in a Linen model are not reached, and how to convert them."""
    kind = next(iter(bridged.values())).__name__
    return (
        "jfp8.convert does not reach NNX modules in a Linen model, whose products stay in high "
        f"precision: {_listed([_named(*item) for item in bridged.items()])}. Convert them where "
        "they are made, in the bridge that makes their parameters those of the model: "
        f"nnx.bridge.to_linen(lambda *args, **kwargs: jfp8.convert({kind}(*args, **kwargs)), ...)."
    )


def own_parameters(
    kinds: Mapping[str, type], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> dict[str, tuple[type, dict[str, tuple[int, ...]]]]:
    """Find the modules that are neither Flax's nor jfp8's, with their larger parameters."""
    found = {}
    for path, parameters in shapes.items():
        kind = kinds.get(path)
        large = {name: shape for name, shape in parameters.items() if len(shape) >= 2}
        if kind is not None and large and not is_known(kind):
            found[path] = (kind, large)
    return found


def is_known(kind: type) -> bool:
    """Tell whether this class of modules is one of Flax or jfp8."""
    return kind.__module__.split(".")[0] in ("flax", "jfp8")


def _named(path: str, kind: type) -> str:
    return f"{kind.__name__} at {path!r}" if path else f"{kind.__name__}, the model itself"


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _LISTED
    return "; ".join(items[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
