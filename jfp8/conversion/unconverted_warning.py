"""Warn of a conversion that changed nothing, and say why each layer stayed as it was."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from jfp8.conversion.selection import Decision
from jfp8.scaling.printing import listed
from jfp8.tracing.caller import user_level


def warn_of_nothing(
    name: str,
    stayed: Mapping[str, Decision],
    unused: Mapping[str, tuple[int, ...]],
    weights: str = "its parameters",
) -> bool:
    """Warn that no product of a model is FP8, unless the user asked for that; tell if it warned.

    Args:
      name: the model's.
      stayed: the decisions on all layers and parameters by which a product was found.
      unused: the shapes of parameters by which none was found.
      weights: says where the model has its parameters.
    """
    if any(x.recipe is not None or x.chosen for x in stayed.values()):
        return False
    said = [f"It has none with an operand made of {weights}, and of no data, where that is seen."]
    if stayed:
        layers = [f"{path or 'the model itself'}: {x.reason}" for path, x in stayed.items()]
        edges = any(x.reason.startswith("exempt: ") for x in stayed.values())
        cure = " exempt=() exempts none." if edges else ""
        said = [f"Layers that it left as they are, and why: {listed(layers, between='; ')}.{cure}"]
    if unused:
        parameters = listed([f"{path} {shape}" for path, shape in unused.items()], between="; ")
        said.append(
            f"Parameters of which it saw no product: {parameters}. Inside functions with "
            "derivatives of their own (jax.custom_vjp) it sees none: use jfp8.linen.DotGeneral or "
            "EinsumProduct, jfp8.nnx.DotGeneral or EinsumOp, or jfp8.scaled_dot_general there, and "
            "leave the derivative to JAX."
        )
    warnings.warn(
        f"No product of {name} is FP8: jfp8.convert changed nothing. {' '.join(said)} "
        "jfp8.report lists every product.",
        UserWarning,
        stacklevel=user_level(),
    )
    return True


def bridged_message(bridged: Mapping[str, type]) -> str:
    """Say that NNX modules in a Linen model are not reached, and how to convert them."""
    kind = next(iter(bridged.values())).__name__
    named = [f"{kind.__name__} at {path!r}" for path, kind in bridged.items()]
    return (
        "jfp8.convert does not reach NNX modules in a Linen model, whose products stay in high "
        f"precision: {listed(named, between='; ')}. Convert them where "
        "they are made, in the bridge that makes their parameters those of the model: "
        f"nnx.bridge.to_linen(lambda *args, **kwargs: jfp8.convert({kind}(*args, **kwargs)), ...)."
    )


def is_known(kind: type) -> bool:
    """Tell whether this class of modules is one of Flax or jfp8."""
    return kind.__module__.split(".")[0] in ("flax", "jfp8")
