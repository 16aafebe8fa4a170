"""Derivatives of FP8 operations: which JAX may take, and what they leave behind."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jfp8.products.operation import Options
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.caller import user_level
from jfp8.tracing.compat import rules_in_checkpoints
from jfp8.tracing.loss import LOSS
from jfp8.tracing.notes import EXPLAINING

OPTIONS: Any = jax.config


class CustomVjp(jax.custom_vjp):
    """A ``jax.custom_vjp`` whose forward rule runs inside every ``jax.checkpoint``, so observes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with rules_in_checkpoints() if OPTIONS.jax_remat3 else contextlib.nullcontext():
            return super().__call__(*args, **kwargs)


_CONSTANT_SINK = (
    "A loss is differentiated with respect to a weight of an FP8 matmul, but not to its sink, so "
    "the amax of its gradient is not recorded. Differentiate with respect to 'fp8_sink' (or "
    "'_overwrite_with_gradient', or the state of a converted function) as well, "
    "jax.grad(loss, argnums=(0, 1))(params, sink), and pass that gradient to jfp8.advance. To "
    "update no histories leave 'fp8_sink' out."
)
_TRAINED_HISTORIES = (
    "A loss is differentiated with respect to the 'fp8' collection: an optimizer that takes all "
    "variables trains amax histories like weights, and no amax is recorded. Use "
    "jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx) with "
    "jfp8.value_and_grad; with another trainer use the collection whose gradient replaces it: "
    "jfp8.convert(model, recipe, state_collection='_overwrite_with_gradient')."
)


def primals(hows: Sequence[Any], arguments: Any, operands: Sequence[Any]) -> Any:
    """Return the values of a forward rule's `arguments`; warn if a gradient leaves amaxes behind.

    Args:
      hows: the `How` of each product.
      arguments: a tree of ``CustomVJPPrimal``, which say what the gradient is with respect to.
      operands: the `Operands` of each product, parts of `arguments`.
    """
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    values = jax.tree.map(lambda x: x.value, arguments, is_leaf=is_primal)
    if EXPLAINING.value is not None:
        return values
    each = lambda *trees: [x.perturbed for x in jax.tree.leaves(trees, is_leaf=is_primal)]
    is_trained = lambda *trees: any(each(*trees))
    for how, of_product in zip(hows, operands, strict=True):
        # With these options ``jax.checkpoint`` says that the gradient is with respect to all.
        if (OPTIONS.jax_remat3 or OPTIONS.jax_custom_vjp3) and all(each(of_product)):
            continue
        trained = is_trained(of_product.rhs, of_product.carrier)
        constant = of_product.sink is not None and not of_product.sink.perturbed
        told = {
            how.options.if_trained or "": trained,
            _CONSTANT_SINK: trained and constant,
            _TRAINED_HISTORIES: is_trained(of_product.histories),
        }
        if LOSS.value is not None and not LOSS.value.is_scaled:
            told[_why_vanishing(how.options.recipe, of_product, LOSS.value.remedy)] = True
        for message in filter(None, told):
            if told[message]:
                warnings.warn(message, stacklevel=user_level())
    return values


def _why_vanishing(recipe: Recipe, operands: Any, remedy: str) -> str:
    """Return a warning if small gradients of a product are zero without a loss scale, else ""."""
    arrays = jax.tree.leaves((operands.lhs, operands.rhs, operands.carrier))
    if not recipe.needs_loss_scale and jnp.float16 not in [x.value.dtype for x in arrays]:
        return ""
    unscaled = f"under {recipe.name!r}, which does not scale them"
    where = unscaled if recipe.needs_loss_scale else "in float16"
    return f"Small gradients are zero {where}, and there is no loss scale. Add one: {remedy}."


_first_order_p = Primitive("first_order_only")
_first_order_p.def_impl(lambda x, **names: x)
_first_order_p.def_abstract_eval(lambda x, **names: x)
batching.primitive_batchers[_first_order_p] = lambda values, dims, **names: (
    _first_order_p.bind(*values, **names),
    dims[0],
)


def first_order_only(
    x: Any, of: str = "FP8 products", instead: str = "nn.Dense", options: Options | None = None
) -> Any:
    """Return `x`; to differentiate it, as only a second derivative does, raises.

    If `options` emulate the product, to compile it for another platform than a CPU warns.
    """
    if isinstance(x, ScaledArray):
        return x
    emulated = options is not None and options.device is None and options.implementation is None
    return _first_order_p.bind(x, of=of, instead=instead, on="cpu" if emulated else "")


def _refuse_second_order(primals: Any, tangents: Any, *, of: str, instead: str, on: str) -> Any:
    del primals, tangents, on
    raise TypeError(
        f"Second derivatives of {of} are not supported: the backward pass works on f8 bytes, "
        f"through which nothing can be differentiated. Use {instead} where you need them. If you "
        "do not: JAX also takes one where a function that is differentiated calls jax.vjp, "
        "jax.grad or nn.vjp itself, even if only the value is used. Then compute the value "
        "outside of that call, and pass jax.lax.stop_gradient of inputs and parameters into it."
    )


ad.primitive_jvps[_first_order_p] = _refuse_second_order


def _lower(context: Any, x: Any, *, on: str, **names: str) -> Any:
    others = sorted({"cuda", "rocm", "tpu"} & set(context.module_context.platforms))
    if on and others:
        warnings.warn(
            f"A program with FP8 products that was traced for a CPU is compiled for {others}: its "
            "products are emulated, and slow. Trace it in jfp8.for_platforms"
            f"({', '.join(map(repr, others))}), with 'cpu' if it is compiled for that, too.",
            stacklevel=2,
        )
    return [x]


mlir.register_lowering(_first_order_p, _lower)
