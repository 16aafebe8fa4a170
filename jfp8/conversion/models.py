"""Convert models without editing them: `convert` a model, `autocast` part of a program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

import flax.linen as nn
from flax import nnx

from jfp8.conversion import linen, nnx_copy
from jfp8.conversion.function import Fp8Function, convert_function
from jfp8.conversion.selection import Choice, Recipes, Selection, select
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.formats import FormatLike

Model = TypeVar("Model", nn.Module, nnx.Module)


@overload
def convert(
    model: Model,
    recipe: Recipes = DelayedScaling(),
    *example: Any,
    exempt: Choice | Sequence[Choice] | None = None,
    only: Choice | Sequence[Choice] | None = None,
    attention: bool = False,
    state_collection: StateCollection = "fp8",
    cache_dtype: FormatLike | None = None,
    weights: None = None,
) -> Model: ...


@overload
def convert(
    model: Callable[..., Any],
    recipe: Recipes = DelayedScaling(),
    *example: Any,
    exempt: Choice | Sequence[Choice] | None = None,
    only: Choice | Sequence[Choice] | None = None,
    attention: bool = False,
    state_collection: StateCollection = "fp8",
    cache_dtype: FormatLike | None = None,
    weights: int | Sequence[int] | None = None,
) -> Fp8Function: ...


def convert(
    model: Any,
    recipe: Recipes = DelayedScaling(),
    *example: Any,
    exempt: Choice | Sequence[Choice] | None = None,
    only: Choice | Sequence[Choice] | None = None,
    attention: bool = False,
    state_collection: StateCollection = "fp8",
    cache_dtype: FormatLike | None = None,
    weights: int | Sequence[int] | None = None,
) -> Any:
    """Return the same model, or function, with FP8 matmuls, forward and backward.

    `model` itself does not change. The converted model has the same parameters, in names, shapes
    and initial values, so that checkpoints fit both. Layers of Flax, and products that a module
    computes itself with one of its parameters, are converted; docs/converting.md lists which.
    `jfp8.report` lists all products. If none becomes FP8 although `exempt` and `only` do not ask
    for that, a ``UserWarning`` says why.

    State is as for `jfp8.Dense`: ``init`` returns ``fp8`` and ``fp8_sink`` besides ``params``.

    A function of arrays, of whatever library, becomes an `Fp8Function`: matmuls, convolutions and
    ragged products of its weights with something else are FP8, also inside ``jit``, ``scan``,
    ``checkpoint``, ``cond`` and ``shard_map``. Its state is one more argument, whose gradient is
    its next value: see "Without Flax" in the docs.

    Args:
      model: a Linen or NNX module; or a function of arrays, such as a loss.
      recipe: the quantizer of each operand. Or a dict, ``{"layers_0/*": None, "*/attention/*":
        "mxfp8", "*": "nvfp4"}``: patterns of paths and the recipes of the layers that they match.
        The first that matches wins; None, as no match, leaves layers in high precision.
      *example: for an NNX model, arguments of a call, or their shapes. Then only matmuls that
        become FP8 in that call keep state; without it all that may become FP8 do.
      exempt: layers that stay in high precision: patterns of paths (``"decoder/*"``), types
        (``nn.Conv``), members of `jfp8.Edge`, functions ``(path, layer) -> bool``; one or several.
        Default: `jfp8.EDGES`, the first convolution of an image model and the final logits. ``()``
        exempts none; ``(*jfp8.EDGES, "decoder/*")`` adds to the default. ``"slower"`` exempts the
        matmuls and attention that the GPU for which JAX traces is expected to compute more slowly
        in FP8, by their sizes in each call; its rates must be known ("GPUs" in the docs). ``"slower
        on NVIDIA H100"`` decides for that card, whatever is here.
      only: convert these layers and no others, given like `exempt`, whose default is then ``()``.
      attention: also convert attention itself, between the projections of
        ``MultiHeadDotProductAttention`` (NNX: ``MultiHeadAttention``), by
        `scaled_dot_product_attention`. Its path is ``"<path of the layer>/attention"`` (NNX: that
        of the layer). A call with dropout of its weights or ``sow_weights`` raises.
      state_collection: for a Linen model, the place of the amax histories: ``"fp8"``, or
        ``"_overwrite_with_gradient"`` for loops that replace its variables by their gradients, such
        as Flax's own ``TrainState``.
      cache_dtype: how attention stores earlier keys and values for decoding: an FP8 format, or a
        wide dtype; see ``decode=True`` of `jfp8.TransformerLayer`. Of ``init_cache`` of NNX layers,
        it replaces the dtype. A call then takes any number of positions. None does as Flax.
      weights: for a function, the position of the argument that holds its weights, a pytree, or
        several positions; default 0. A layer is called by the path of its weight there, and
        `attention` means all matmuls of two activations.

    Returns:
      A Linen module or an NNX module that shares the arrays of `model`, both an instance of a
      subclass of ``type(model)``; or an `Fp8Function`.

    Raises:
      TypeError: `model` is not a model, `recipe` is not a recipe, or `exempt`, `only` or
        `cache_dtype` is none of the above.
      ValueError: unknown `state_collection`, or one for an NNX model; a pattern or a type that
        matches no layer, or a pattern that only matches layers which one before it matches; a cache
        that `cache_dtype` does not reach; `weights` for a model; ``exempt="slower"`` without a GPU
        whose rates are known. For Linen models ``init`` and
        ``apply`` raise these, for functions ``init``, because their layers exist only then.

    Warns:
      UserWarning: nothing becomes FP8; scales of a causal model depend on later positions; or a
        training step is traced for a GPU that is expected to run converted matmuls at less than
        0.97 of their speed in bf16.

    >>> import flax.linen as nn, jax, jax.numpy as jnp, jfp8
    >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
    >>> fp8_model = jfp8.convert(model, jfp8.recipes.Float8CurrentScaling())
    >>> fp8_model.init(jax.random.key(0), jnp.ones((1, 32))).keys()
    dict_keys(['params'])

    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])
    >>> w, x = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 4))}, jnp.ones((2, 8))
    >>> f = jfp8.convert(loss, "delayed", exempt=())
    >>> state = f.init(w, x)
    >>> value, (grads, state) = jax.value_and_grad(f, argnums=(0, 1))(w, state, x)
    >>> sorted(state)
    ['down', 'up']
    """
    if isinstance(recipe, nn.Module | nnx.Module):
        raise TypeError("recipe is a model, which comes first: jfp8.convert(model, recipe).")
    if example and not isinstance(model, nnx.Module):
        raise TypeError(
            f"jfp8.convert(model, recipe) got {len(example)} more arguments, which are an example "
            "of an NNX model's call. Functions and Linen models get theirs by init."
        )
    selected = select(recipe, exempt, only, attention, state_collection, cache_dtype)
    selection = selected.for_gpu()
    if callable(model) and not isinstance(model, nn.Module | nnx.Module | type):
        return convert_function(model, selection, 0 if weights is None else weights)
    if weights is not None:
        raise ValueError(
            f"weights={weights!r} is for functions; a model of Flax has parameters. Leave it out."
        )
    return convert_selected(cast(Any, model), selection, example)


def convert_selected(model: Model, selection: Selection, example: tuple[Any, ...] = ()) -> Model:
    """Convert by a `Selection`."""
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise TypeError(
                "convert got a model that is bound to variables. Convert the model first, then "
                "call .bind or .apply of the result."
            )
        return cast(Model, linen.convert_module(model, selection))
    if isinstance(model, nnx.Module):
        if selection.state_collection != "fp8":
            raise ValueError(
                f"state_collection={selection.state_collection!r} is for Linen models: NNX has no "
                "collections. Histories of an NNX model are variables of the type "
                "jfp8.nnx.Fp8State, which calls of the model update."
            )
        return cast(Model, nnx_copy.convert_model(model, selection, example))
    given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise TypeError(
        f"model must be a Flax Linen or NNX module, got {given}. Convert the model, not its class "
        "or its parameters: jfp8.convert(MyModel(...), recipe)."
    )


@contextlib.contextmanager
def autocast(recipe: RecipeLike = DelayedScaling(), *, enabled: bool = True) -> Iterator[None]:
    """Make the Linen layers that are called in this region multiply in FP8.

    In it, Flax's own layers and products of parameters (see `convert`), and layers of jfp8 without
    a recipe, use `recipe`. A layer or a converted model with its own recipe keeps that. The
    innermost region holds; with ``enabled=False`` everything in it is in high precision.

    The region is part of the key under which JAX caches a compiled function, so a function that was
    jitted and called outside is traced again inside. Each thread has its own regions.

    Without an ``fp8`` collection in its variables a model uses current scaling; ``model.init``
    inside the region makes one. NNX layers that are not jfp8's, and models of other libraries,
    are left alone: use `convert`, which takes functions, too.

    Args:
      recipe: the quantizer of each operand.
      enabled: False for a region of high precision.

    Returns:
      A context manager, which gives None.

    Raises:
      TypeError: `recipe` is not a recipe.

    >>> import flax.linen as nn, jax, jax.numpy as jnp, jfp8
    >>> model, x = nn.Dense(4), jnp.linspace(0, 1, 6).reshape(2, 3)
    >>> variables = model.init(jax.random.key(0), x)
    >>> apply = jax.jit(model.apply)
    >>> y = apply(variables, x)
    >>> with jfp8.autocast(jfp8.recipes.Float8CurrentScaling()):
    ...     bool((apply(variables, x) == y).all())
    False
    """
    with linen.in_region(check_recipe(recipe), bool(enabled)):
        yield
