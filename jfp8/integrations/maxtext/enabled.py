"""Let MaxText's ``quantization`` take recipes of jfp8 in a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from maxtext.configs import pyconfig, types
from maxtext.layers import moe, quantizations
from maxtext.trainers.pre_train import train

import jfp8.linen
from jfp8.integrations.maxtext.quantization import NAMES, STATE, Quantization, configured
from jfp8.products.ragged.dot import scaled_ragged_dot
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.recipe import Recipe

_STATE = "jfp8_state"  # the attribute of the model while gradients are accumulated


@contextmanager
def enabled() -> Iterator[None]:
    """Let MaxText's pre-training take ``quantization=jfp8_delayed`` and other recipes inside.

    It replaces six functions of MaxText and puts them back at the end. With any other
    ``quantization`` they do what they did. ::

        from maxtext.trainers.pre_train import train

        with enabled():
            config, recorder = train.initialize(argv)
            train.run(config, recorder)

    Raises:
      RuntimeError: within itself, where each function would be replaced twice.
    """
    if getattr(quantizations.configure_quantization, "__globals__", None) is globals():
        raise RuntimeError(
            "enabled() is in effect already: leave out the inner one. (The command "
            "`python -m jfp8.integrations.maxtext` contains one.)"
        )
    replacements: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (pyconfig, "initialize", _taking_names),
        (quantizations, "configure_quantization", _configuring),
        (moe, "GateLogit", _in_high_precision),
        (moe.mblx, "gmm", multiplying),
        (train, "gradient_accumulation_loss_and_grad", accumulating),
    ]
    with suppress(ImportError):  # without this module nothing shards results over explicit axes
        from maxtext.layers import linears

        sharded = partial(_sharded, linears.truncate_out_sharding)
        replacements.append((linears, "_compute_dot_general_nnx", sharded))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, replacement in replacements:
            setattr(owner, name, replacement(getattr(owner, name)))
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _taking_names(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Add `NAMES` to the values of ``quantization`` that `initialize` allows."""

    @wraps(initialize)
    def initialize_taking_names(
        argv: Any = None, config_class: Any = types.MaxTextConfig, **more: Any
    ) -> Any:
        return initialize(argv, config_class=_config_with_names(config_class), **more)

    return initialize_taking_names


def _config_with_names(config_class: Any) -> Any:
    """Derive a `config_class` whose ``quantization`` may be one of `NAMES`, too."""
    field = config_class.model_fields["quantization"]
    allowed = field.annotation | StrEnum("Recipes", {name: name for name in NAMES})
    own = {"__annotations__": {"quantization": allowed}, "quantization": field.default}
    return type(config_class.__name__, (config_class,), own | {"__module__": __name__})


def _configuring(configure: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(configure)
    def configure_quantization(config: Any, quant_mode_str: str = "train") -> Any:
        if config.quantization in NAMES:
            return configured(config, quant_mode_str)
        return configure(config, quant_mode_str)

    return configure_quantization


def _sharded(
    truncate: Callable[..., Any], compute: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Make FP8 matmuls shard their results over explicit axes as `compute` does others."""

    @wraps(compute)
    def compute_dot_general(
        lhs: jax.Array,
        rhs: jax.Array,
        axes: tuple[int, ...],
        rhs_axes: tuple[int, ...],
        precision: Any,
        multiply: Any,
        initializing: bool,
        out_sharding: Any = None,
        **more: Any,
    ) -> jax.Array:
        ours = isinstance(getattr(multiply, "to_nnx__module", None), jfp8.linen.DotGeneral)
        if not ours or out_sharding is None:
            given = precision, multiply, initializing, out_sharding
            return compute(lhs, rhs, axes, rhs_axes, *given, **more)
        ndim = lhs.ndim + rhs.ndim - len(axes) - len(rhs_axes)
        how = {"out_sharding": truncate(out_sharding, ndim)}
        operands = lhs, rhs, ((axes, rhs_axes), ((), ()))
        if initializing:
            multiply.lazy_init(*operands, **how)
        return multiply(*operands, **how, mutable=["aqt"])

    return compute_dot_general


def _in_high_precision(router: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `router` of a mixture of experts ignore a `Quantization` of jfp8."""

    @wraps(router)
    def make(*args: Any, quant: Any = None, **more: Any) -> Any:
        return router(*args, quant=None if isinstance(quant, Quantization) else quant, **more)

    return make


def multiplying(gmm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make ``megablox.gmm`` multiply by `scaled_ragged_dot` if its dtype is a recipe.

    MaxText calls it inside a ``shard_map``, where no state is within reach: each device scales
    operands by their own amaxes.
    """

    @wraps(gmm)
    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        preferred_element_type: Any = None,
        *args: Any,
        lhs_quantize_dtype: Any = None,
        **more: Any,
    ) -> jax.Array:
        if not isinstance(lhs_quantize_dtype, Recipe):
            more |= {"lhs_quantize_dtype": lhs_quantize_dtype}
            return gmm(lhs, rhs, group_sizes, preferred_element_type, *args, **more)
        recipe = recipe_in_effect(lhs_quantize_dtype, "")
        if recipe is None:
            more |= {"rhs_quantize_dtype": None}
            return gmm(lhs, rhs, group_sizes, preferred_element_type, *args, **more)
        _check(more)
        y = scaled_ragged_dot(
            lhs, rhs, group_sizes, recipe=recipe, preferred_element_type=preferred_element_type
        )
        partial_sum = more.get("partial_sum")
        return y if partial_sum is None else y + partial_sum

    return multiply


def _check(more: dict[str, Any]) -> None:
    offset = more.get("group_offset")
    elsewhere = offset is not None and not (isinstance(offset, int) and offset == 0)
    if elsewhere or more.get("weight_gather_axes") or more.get("transpose_rhs"):
        raise NotImplementedError(
            "The grouped product of jfp8 knows no group offset, no gathering of weights and no "
            "transposed weights. Set use_ring_of_experts=False and shard_exp_on_fsdp=False, or "
            "sparse_matmul=False."
        )


def accumulating(accumulate: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``gradient_accumulation_loss_and_grad`` replace the state by its gradient.

    MaxText differentiates with respect to parameters alone, so the state goes in as one more. The
    sum over micro-batches and the division by the number of tokens do not change what it says.
    """

    @wraps(accumulate)
    def with_state(
        loss_fn: Any, config: Any, model: Any, params: Any, params_shardings: Any, *more: Any
    ) -> Any:
        state = nnx.state(model, nnx.variable_type_from_name(STATE, allow_register=True))
        if not jax.tree.leaves(state):
            return accumulate(loss_fn, config, model, params, params_shardings, *more)
        values, tree = jax.tree.flatten(state)
        count = range(len(values))

        @wraps(loss_fn)
        def loss_of(model: Any, *args: Any, **kwargs: Any) -> Any:
            held = getattr(model, _STATE)
            given = [held[i].get_value().astype(jnp.float32) for i in count]
            nnx.update(model, jax.tree.unflatten(tree, given))
            return loss_fn(model, *args, **kwargs)

        everywhere = NamedSharding(jax.tree.leaves(params_shardings)[0].mesh, PartitionSpec())
        own = nnx.Dict({_STATE: nnx.List([nnx.Param(everywhere) for _ in values])})
        shardings = nnx.merge_state(params_shardings, nnx.state(own))
        setattr(model, _STATE, nnx.List([nnx.Param(value) for value in values]))
        loss, aux, grads = accumulate(loss_of, config, model, params, shardings, *more)
        delattr(model, _STATE)
        new = [grads[_STATE][i].get_value().astype(jnp.float32) for i in count]
        nnx.update(model, jax.tree.unflatten(tree, new))
        del grads[_STATE]
        return loss, aux, grads

    return with_state
