"""Let MaxText's ``quantization`` take recipes of jfp8 in a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from typing import Any

from maxtext.configs import pyconfig, types
from maxtext.layers import moe, quantizations
from maxtext.trainers.pre_train import train

from jfp8.integrations.maxtext.accumulation import accumulating
from jfp8.integrations.maxtext.grouped import multiplying
from jfp8.integrations.maxtext.quantization import NAMES, Quantization, configured


@contextmanager
def enabled() -> Iterator[None]:
    """Let MaxText's pre-training take ``quantization=jfp8_delayed`` and other recipes inside.

    It replaces five functions of MaxText and puts them back at the end. With any other
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


def _in_high_precision(router: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `router` of a mixture of experts ignore a `Quantization` of jfp8."""

    @wraps(router)
    def make(*args: Any, quant: Any = None, **more: Any) -> Any:
        return router(*args, quant=None if isinstance(quant, Quantization) else quant, **more)

    return make
