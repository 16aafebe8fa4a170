"""Keras 3 on JAX: a model that `fit`, `evaluate` and `predict` compute with FP8 matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras

from jfp8.conversion.function import Fp8Function, convert_function
from jfp8.conversion.selection import Choice, Recipes, select
from jfp8.recipes.per_tensor import DelayedScaling


def convert(
    model: keras.Model,
    recipe: Recipes = DelayedScaling(),
    *,
    exempt: Choice | Sequence[Choice] | None = None,
    only: Choice | Sequence[Choice] | None = None,
    attention: bool = False,
    inputs: Any = None,
) -> keras.Model:
    """Return a Keras model with the layers and variables of `model`, and FP8 matmuls.

    Compile and fit it as any. Amax histories are separate variables that the optimizer replaces
    by their gradients (``overwrite_with_gradient``), so they are saved with its weights.

    Args:
      model: a model made of ``keras.Input``, or any other that was called once.
      recipe, exempt, only, attention: see `jfp8.convert`. A matmul is called by the path of its
        variable, ``"sequential/dense/kernel"``.
      inputs: arguments of a call, or their shapes, if the model does not know its own.

    Raises:
      ValueError: `model` is not built, or `inputs` are missing; the backend of Keras is not JAX.

    Source: ``keras.Model.stateless_call``, which the JAX trainer of Keras differentiates.
    """
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"The backend of Keras is {keras.backend.backend()!r}. Set KERAS_BACKEND=jax before "
            "Keras is imported."
        )
    inputs = getattr(model, "inputs", None) if inputs is None else [inputs]
    if not model.built or inputs is None:
        raise ValueError(
            f"The shapes of {model.name!r} are not known: call it once on a batch, and pass that "
            "here: convert(model, recipe, inputs=batch)."
        )
    return _Fp8Model(model, select(recipe, exempt, only, attention), inputs)


class _Fp8Model(keras.Model):
    def __init__(self, model: keras.Model, selection: Any, inputs: Sequence[Any]) -> None:
        super().__init__(name=model.name)
        self.inner = model
        self._selection = selection
        self._states: dict[str, Any] = {}
        shaped = lambda x: jax.ShapeDtypeStruct(
            [n or 1 for n in x.shape], jax.dtypes.canonicalize_dtype(x.dtype)
        )
        weights = {v.path: shaped(v.value) for v in model.trainable_variables}
        others = [shaped(v.value) for v in model.non_trainable_variables]
        batch = [jax.tree.map(shaped, inputs[0] if len(inputs) == 1 else inputs)]
        for name, state in self._function(model).init(weights, others, batch).items():
            self._states[name] = self.add_weight(
                shape=state.shape,
                initializer="zeros",
                dtype="float32",
                name=f"fp8_{name.replace('/', '_')}",
                overwrite_with_gradient=True,
            )
        self.built = True

    def _function(self, model: keras.Model, **kwargs: Any) -> Fp8Function:
        """Return the call of `model` as a function of its weights by path, and of the rest."""

        def call(weights: dict[str, Any], others: Any, args: Any) -> Any:
            values = [weights[v.path] for v in model.trainable_variables]
            return model.stateless_call(values, others, *args, **kwargs)

        call.__name__ = model.name
        return convert_function(call, self._selection, 0)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model that was converted does, in high precision."""
        return self.inner(*args, **kwargs)

    def stateless_call(
        self, trainable_variables: Any, non_trainable_variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what ``keras.Model.stateless_call`` does, by FP8 matmuls."""
        by_path = dict(zip([v.path for v in self.trainable_variables], trainable_variables))
        states = {name: by_path[v.path] for name, v in self._states.items()}
        weights = {v.path: by_path[v.path] for v in self.inner.trainable_variables}
        function = self._function(self.inner, **kwargs)
        return function(weights, states, non_trainable_variables, args)
