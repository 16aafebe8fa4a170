"""`initialize`: set up FP8 training in one call, from arguments or from the text of a file."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import optax

from jfp8.conversion.models import Model, convert_selected
from jfp8.conversion.selection import Choice, select
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.optim import Blocks, ScaledFloat16, fp8_gradients, loss_scale, skip_on_overflow
from jfp8.optim.stored_state import StoredState, store_state
from jfp8.optim.wrapping import has_master_weights, states_of, transformation
from jfp8.recipes import registry
from jfp8.recipes.per_layer import PerLayer, check_recipes
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.listing import did_you_mean

OptLevel = Literal["O0", "O1", "O2"]

# By the names of optax: the first moment (``trace`` of sgd and others), and the second.
# Stochastic: with rounding to nearest, a moment stops a third away from its target.
_FIRST = Blocks(rounding="stochastic")
_RECIPE = (Recipe, str, Mapping, type(None))  # or a class, of which `check_recipe` complains
_MOMENTS = {"mu": _FIRST, "trace": _FIRST, "nu": ScaledFloat16()}


def initialize(
    model: Model,
    tx: optax.GradientTransformation,
    config: Mapping[str, Any] | str | None = None,
    *,
    recipe: registry.RecipeLike | Mapping[str, Any] = DelayedScaling(),
    opt_level: OptLevel = "O0",
    axis_name: Any = None,
    exempt: Choice | Sequence[Choice] | None = None,
    only: Choice | Sequence[Choice] | None = None,
    output_fused: Sequence[str] = (),
    state_collection: StateCollection = "fp8",
    verbose: bool = False,
) -> tuple[Model, optax.GradientTransformation]:
    """Return the model and the optimizer, ready for FP8.

    The model is converted (see `jfp8.convert`). What the optimizer becomes depends on `opt_level`;
    each contains those before it. ::

        "O0"   tx; or skip_on_overflow(chain(loss_scale(), tx)) if the recipe needs a loss scale
        "O1"   chain(fp8_gradients(axis_name=axis_name), ...)     gradients and their mean in FP8
        "O2"   ... store_state(tx, {"mu": Blocks(rounding="stochastic"), "nu": ScaledFloat16()})
               3.03 bytes per parameter for both moments instead of 8

    These are MS-AMP's levels. O2 takes any optax optimizer with such moments (``mu``, ``nu``, or
    the ``trace`` of ``optax.sgd`` with momentum). For less memory leave them to
    `jfp8.optim.adamw`, and choose O1.

    Data parallelism: in a loop under ``jax.shard_map`` or ``jax.pmap`` pass its axis as
    `axis_name`, and give `tx` the local gradients. Under a plain ``jit``, and with a
    `jfp8.TrainState` also under ``jax.shard_map``, leave it out and wrap the gradient function:
    ``jfp8.data_parallel(jfp8.value_and_grad(loss_fn), mesh=mesh)``.

    Args:
      model: a Linen or NNX module.
      tx: an optax optimizer.
      config: the arguments below as a dict or as the text of a JSON or YAML file (YAML if PyYAML is
        installed): ``{"mixed_precision": "fp8", "recipe": "delayed", "exempt": ["decoder/*"]}``.
        A setting must not be an argument too. With ``"mixed_precision": "no"``, model and
        optimizer are unchanged.
      recipe: a recipe, its name, or ``{"name": ..., field: value, ...}``; or patterns of paths with
        one of these, or None, for the layers that they match, as for `jfp8.convert`.
      opt_level: ``"O0"``: FP8 matmuls. ``"O1"``: also FP8 gradients and communication. ``"O2"``:
        also an FP8 first moment and a 16-bit second one.
      axis_name: mapped axis, or axes, over which `tx` averages gradients; needs O1 or O2.
      exempt, only: layers that stay in high precision, or the only ones converted.
      output_fused: patterns of layers whose results stay in high precision under recipes that
        quantize results (``direct_e5m2``, ``hybrid``).
      state_collection: collection of the amax histories of a Linen model; see `jfp8.convert`.
      verbose: print the report of the conversion: for Linen at the end of ``model.init``, when the
        shapes are known; for NNX at once, which layers are converted.

    Returns:
      ``(model, tx)``.

    Raises:
      TypeError, ValueError: unknown keys or values; a setting that is given twice. With O2
        ``tx.init`` also raises if the optimizer has no moments, or has them in few bits already.

    References:
      MS-AMP, "Optimization Level" in its user tutorial; FP8-LM, arXiv 2310.18313.

    >>> import flax.linen as nn, jfp8, optax
    >>> model, tx = nn.Dense(8), optax.adam(1e-3)
    >>> model, tx = jfp8.initialize(model, tx, {"mixed_precision": "fp8", "recipe": "delayed"})
    """
    if config is not None:
        settings = _settings(config, locals())
        in_fp8 = settings.pop("mixed_precision") == "fp8"
        return initialize(model, tx, **settings) if in_fp8 else (model, tx)
    if opt_level not in ("O0", "O1", "O2"):
        raise ValueError(f"opt_level={opt_level!r}: allowed are 'O0', 'O1' and 'O2'.")
    if opt_level == "O0" and axis_name is not None:
        raise ValueError(
            f"axis_name={axis_name!r} averages gradients in FP8, which opt_level='O0' does not do. "
            "Use opt_level='O1', or jax.lax.pmean for a mean in f32."
        )
    chosen = _with_fused(_recipes(recipe), output_fused)
    selection = select(chosen, exempt, only, state_collection=state_collection).for_gpu()
    converted = convert_selected(model, dataclasses.replace(selection, verbose=verbose))
    if opt_level == "O2":
        tx = _with_stored_moments(tx)
    if chosen.needs_loss_scale:
        tx = skip_on_overflow(optax.chain(loss_scale(), tx))
    if opt_level != "O0":
        # In front of the loss scale, which then has the same mean on all devices, and skips the
        # same steps. It is a power of two, so the codes are the same as of unscaled gradients.
        tx = optax.chain(fp8_gradients(axis_name=axis_name), tx)
    return converted, tx


def _with_stored_moments(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    inner = transformation("initialize", tx)

    def init(params: optax.Params) -> Any:
        state = jax.eval_shape(inner.init, params)
        if has_master_weights(state):
            raise ValueError(
                "opt_level='O2' would store the masters of master_weights, which are state of tx, "
                "in few bits too. Store the state of its inner optimizer instead, and use O1: "
                "master_weights(jfp8.optim.adamw(1e-3, preset='msamp_o2'))."
            )
        if states_of(StoredState, state):
            raise ValueError(
                "opt_level='O2' stores moments in few bits, but tx does that already. Use O1."
            )
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        fields = {getattr(key, "name", None) for path in paths for key in path}
        present = {name: storage for name, storage in _MOMENTS.items() if name in fields}
        if not present:
            raise ValueError(
                "opt_level='O2' stores the moments of tx in few bits, but it has none. Use O1, or "
                "an optimizer that has them, such as optax.adamw(1e-3). It has the fields "
                f"{sorted(filter(None, fields))}."
            )
        return store_state(tx, present).init(params)

    return optax.GradientTransformationExtraArgs(init, store_state(tx, _MOMENTS).update)


def _settings(config: Mapping[str, Any] | str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `initialize` that are `given`, replaced by the settings of `config`."""
    parameters = inspect.signature(initialize).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}
    settings = {"mixed_precision": "fp8"} | {name: given[name] for name in defaults}
    parsed = _parsed(config) if isinstance(config, str) else config
    if not isinstance(parsed, Mapping):
        raise TypeError(
            "config must be a dict, or the text of a JSON or YAML file that holds one, such as "
            f'{{"mixed_precision": "fp8", "recipe": "delayed"}}; got {parsed!r}.'
        )
    for name, value in parsed.items():
        if name not in settings:
            hint = did_you_mean(str(name), settings)
            raise ValueError(f"config has no key {name!r}.{hint} Keys: {', '.join(settings)}.")
        if name in defaults and given[name] != defaults[name]:
            raise ValueError(f"{name} is given twice: in config, and as an argument.")
        settings[name] = value
    if settings["mixed_precision"] not in ("fp8", "no"):
        raise ValueError(
            f"mixed_precision={settings['mixed_precision']!r}: allowed are 'fp8' and 'no'. For "
            "bf16 set the model's own dtype."
        )
    return settings


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        try:
            import yaml
        except ModuleNotFoundError:
            raise ValueError(
                f"config is not JSON ({error}), and to read YAML PyYAML must be installed: "
                "pip install pyyaml."
            ) from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as yaml_error:
            raise ValueError(f"config is neither JSON nor YAML: {yaml_error}") from yaml_error


def _recipes(given: Any) -> Recipe | PerLayer:
    """Read the recipe of all layers, or the recipes of layers that patterns match."""
    if not isinstance(given, Mapping):
        return registry.check_recipe(given)
    if isinstance(given.get("name"), str):
        return registry.get(**given)
    for pattern, of in given.items():
        if pattern == "name" or not isinstance(of, _RECIPE):
            raise ValueError(
                'A recipe in a config is a name, or {"name": "delayed", field: value, ...}, or has '
                'one of these or null for patterns of paths, {"decoder/*": null, "*": "mxfp8"}; '
                f"got {given!r}, where {pattern!r} is neither a field nor a pattern with a recipe."
            )
    return check_recipes({p: None if of is None else _recipes(of) for p, of in given.items()})


def _with_fused(recipe: Recipe | PerLayer, fused: str | Sequence[str]) -> Recipe | PerLayer:
    patterns = (fused,) if isinstance(fused, str) else tuple(fused)
    if not patterns:
        return recipe
    if "fused" not in {field.name for field in dataclasses.fields(recipe)}:
        raise ValueError(
            f"output_fused={fused!r}: {type(recipe).__name__} does not quantize results, so there "
            'are none to keep in high precision. Recipes that do: "direct_e5m2", "hybrid".'
        )
    fields: dict[str, Any] = {**vars(recipe), "fused": patterns}
    return type(recipe)(**fields)
