"""`initialize`: FP8 training in one call, from arguments or from the content of a file."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import optax
from flax import nnx

from jfp8 import recipes
from jfp8.convert import Model, convert_selected, nnx_decisions
from jfp8.optim.loss_scaling import loss_scale, skip_on_overflow
from jfp8.recipes import DelayedScaling, Recipe, check_recipe
from jfp8.report import report
from jfp8.selection import Choice, select

OptLevel = Literal["O0", "O1", "O2"]

_DEFAULTS = {
    "recipe": DelayedScaling(),
    "opt_level": "O0",
    "exempt": None,
    "only": None,
    "output_fused": (),
    "verbose": False,
}


def initialize(
    model: Model,
    tx: optax.GradientTransformation,
    config: Mapping[str, Any] | str | None = None,
    *,
    recipe: Recipe | str | Mapping[str, Any] = DelayedScaling(),
    opt_level: OptLevel = "O0",
    exempt: Choice | Sequence[Choice] | None = None,
    only: Choice | Sequence[Choice] | None = None,
    output_fused: Sequence[str] = (),
    verbose: bool = False,
) -> tuple[Model, optax.GradientTransformation]:
    """The model and the optimizer, ready for FP8.

    The model is converted (see `jfp8.convert`). The optimizer gets dynamic loss scaling
    (``skip_on_overflow(chain(loss_scale(), tx))``) if the recipe needs it, and stays as it is
    otherwise.

    Args:
      model: a Linen or NNX module.
      tx: an optax optimizer.
      config: the arguments below as a dict or as the text of a JSON or YAML file (YAML if PyYAML is
        installed): ``{"mixed_precision": "fp8", "recipe": "delayed", "exempt": ["decoder/*"]}``.
        What it sets must not be given otherwise. ``"mixed_precision": "no"`` changes nothing.
      recipe: a recipe, its name, or ``{"name": ..., field: value, ...}``.
      opt_level: ``"O0"``: FP8 products. ``"O1"`` (and FP8 gradients and communication) and ``"O2"``
        (and FP8 optimizer state) are not there yet.
      exempt, only: layers that stay in high precision, or are the only ones converted.
      output_fused: patterns of layers whose results stay in high precision under recipes that
        quantize results (``direct_e5m2``, ``hybrid``).
      verbose: print the report of the conversion: for Linen at the end of ``model.init``, when the
        shapes are known; for NNX what is converted, now.

    Returns:
      ``(model, tx)``.

    Raises:
      NotImplementedError: ``opt_level`` ``"O1"`` or ``"O2"``.
      TypeError, ValueError: unknown keys or values; what is given twice.

    >>> import flax.linen as nn, jfp8, optax
    >>> model, tx = nn.Dense(8), optax.adam(1e-3)
    >>> model, tx = jfp8.initialize(model, tx, {"mixed_precision": "fp8", "recipe": "delayed"})
    """
    given = {
        "recipe": recipe,
        "opt_level": opt_level,
        "exempt": exempt,
        "only": only,
        "output_fused": output_fused,
        "verbose": verbose,
    }
    settings = _settings(config, given)
    if settings.pop("mixed_precision") == "no":
        return model, tx
    level = settings["opt_level"]
    if level not in ("O0", "O1", "O2"):
        raise ValueError(f"opt_level={level!r}: allowed are 'O0', 'O1' and 'O2'.")
    if level != "O0":
        raise NotImplementedError(
            f"opt_level={level!r} needs FP8 gradients, communication and optimizer state, which "
            "jfp8 does not have yet. Use opt_level='O0': FP8 products."
        )
    chosen = _with_fused(_recipe(settings["recipe"]), settings["output_fused"])
    selection = select(chosen, settings["exempt"], settings["only"])
    converted = convert_selected(model, selection, _print_report if settings["verbose"] else None)
    if settings["verbose"] and isinstance(model, nnx.Module):
        print("\n".join(f"{path}: {how}" for path, how in nnx_decisions(model, selection)))
    if chosen.needs_loss_scale:
        tx = skip_on_overflow(optax.chain(loss_scale(), tx))
    return converted, tx


def _settings(config: Mapping[str, Any] | str | None, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, with what `config` sets instead; or an error about what it may set."""
    settings = {"mixed_precision": "fp8", **given}
    if config is None:
        return settings
    parsed = _parsed(config) if isinstance(config, str) else config
    if not isinstance(parsed, Mapping):
        raise TypeError(
            "config must be a dict, or the text of a JSON or YAML file that holds one, such as "
            f'{{"mixed_precision": "fp8", "recipe": "delayed"}}; got {parsed!r}.'
        )
    for name, value in parsed.items():
        if name not in settings:
            close = difflib.get_close_matches(str(name), settings, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"config has no key {name!r}.{hint} Keys: {', '.join(settings)}.")
        if name in given and given[name] != _DEFAULTS[name]:
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


def _recipe(given: Any) -> Recipe:
    if isinstance(given, str):
        return recipes.get(given)
    if isinstance(given, Mapping):
        fields = dict(given)
        name = fields.pop("name", None)
        if not isinstance(name, str):
            raise ValueError(
                'A recipe in a config is a name, or {"name": "delayed", field: value, ...}; got '
                f"{given!r}."
            )
        return recipes.get(name, **fields)
    return check_recipe(given)


def _with_fused(recipe: Recipe, fused: str | Sequence[str]) -> Recipe:
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


def _print_report(model: Any, variables: Any, *inputs: Any, **kwargs: Any) -> None:
    shapes = jax.eval_shape(lambda: (variables, inputs))
    print(report(model, *(shapes[0], *shapes[1]), **kwargs))
