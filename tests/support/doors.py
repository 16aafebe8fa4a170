"""One model behind three doors: as a function, in Linen and in NNX.

A model is ``run(p, x)``: ``p["w"]`` is a parameter that it holds itself, and ``p("up", x)`` calls a
layer of Flax, a dense one or a convolution, whose kernel is the parameter ``"up"``. In a function
both are arrays.
"""

from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict
from jax import lax

import jfp8
from support.models import Model

KEY = jax.random.key(0)
ROLES = ("lhs", "rhs", "grad")
Params = dict[str, jax.Array]
Run = Callable[[Any, Any], Any]
convolve = lambda x, w, strides=(1, 1): lax.conv_general_dilated(
    x, w, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
)


def loss_of(y) -> jax.Array:
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y))


def multiply(x, w):
    """Call a layer of Flax, or multiply by an array of two or four dimensions."""
    return w(x) if callable(w) else x @ w if w.ndim == 2 else convolve(x, w)


class Weights:
    """Parameters and layers by their names, as a model sees them; `module` is None in functions."""

    def __init__(self, held: Any, module: Any = None):
        self.held, self.module = held, module

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __call__(self, name: str, x: Any) -> jax.Array:
        return multiply(x, self.held[name])


def _linen(run: Run, params: Params, layers: Collection[str]) -> nn.Module:
    def layer(name, w):
        how = {"use_bias": False, "name": name}
        how |= {"kernel_init": lambda *_: w} if isinstance(w, jax.Array) else {}
        conv = lambda: nn.Conv(w.shape[-1], w.shape[:-2], **how)
        return nn.Dense(w.shape[-1], **how) if w.ndim == 2 else conv()

    def call(module, x):
        own = lambda name, w: module.param(name, lambda _: w)
        held = {n: layer(n, w) if n in layers else own(n, w) for n, w in params.items()}
        return run(Weights(held, module), x)

    return Model(call)


class NnxModel(nnx.Module):
    """A model of `run`."""

    def __init__(self, run: Run, params: Params, layers: Collection[str]):
        self.run, self.names = run, tuple(params)
        for name, w in params.items():
            setattr(self, name, self.layer(w) if name in layers else nnx.Param(w))

    @staticmethod
    def layer(w: jax.Array) -> nnx.Module:
        how = {"use_bias": False, "rngs": nnx.Rngs(0)}
        conv = lambda: nnx.Conv(*w.shape[-2:], w.shape[:-2], **how)
        layer = nnx.Linear(*w.shape, **how) if w.ndim == 2 else conv()
        if isinstance(w, jax.Array):
            layer.kernel[...] = w
        return layer

    def __call__(self, x):
        held = {name: getattr(self, name) for name in self.names}
        own = lambda value: value[...] if isinstance(value, nnx.Param) else value
        return self.run(Weights({name: own(value) for name, value in held.items()}, self), x)


def original(door: str, run: Run, params: Params, layers: Collection[str] = ()) -> Any:
    """Return the model of `run` before it is converted; of layers alone also for shapes."""
    if door == "function":
        return lambda params, x: run(Weights(params), x)
    return {"linen": _linen, "nnx": NnxModel}[door](run, params, layers)


class Converted:
    """A converted model with its parameters and states.

    Attributes:
      model: a converted function or module.
      state: the state that a training step takes and returns.
    """

    model: Any
    state: Any

    def __init__(self, run: Run, params: Params, x: Any, recipe: Any, layers: Any, options: Any):
        self.run, self.params, self.layers = run, params, layers
        self.start(original(self.door, run, params, layers), x, recipe, options)
        self.compiled = jax.jit(self._step)

    def convert(self, model, recipe, *example, **options):
        return jfp8.convert(model, recipe, *example, **options)

    def plain(self, x):
        return self.run(Weights(self.params), x)

    def step(self, x):
        """Return the loss and gradients by the names of parameters; move the states."""
        loss, grads, self.state = self.compiled(self.state, x)
        return loss, grads


class Function(Converted):
    door = "function"

    def start(self, f, x, recipe, options):
        self.model = self.convert(f, recipe, **options)
        self.state = self.model.init(self.params, x)

    def __call__(self, x, params=None):
        return self.model(params or self.params, self.state, x)

    def _step(self, state, x):
        loss = lambda params, state: loss_of(self.model(params, state, x))
        value, (grads, state) = jax.value_and_grad(loss, argnums=(0, 1))(self.params, state)
        return value, grads, state

    def states(self):
        found = {}
        for name, row in self.state.items():
            read = lambda row: jfp8.scaling.read_overwritten(row)[0]
            for _ in range(row.ndim - 1):
                read = jax.vmap(read)
            found[name] = {role: each["amax_history"] for role, each in read(row).items()}
        return found

    def report(self, x):
        return jfp8.report(self.model, self.params, self.state, x)


class Linen(Converted):
    door = "linen"

    def start(self, module, x, recipe, options):
        self.model = self.convert(module, recipe, **options)
        empty = lambda shape: jnp.zeros(shape.shape, shape.dtype)
        variables = jax.tree.map(empty, jax.eval_shape(self.model.init, KEY, x))
        variables["params"] = self.nested(self.params)
        create = jfp8.TrainState.create
        self.state = create(apply_fn=None, variables=variables, tx=optax.sgd(0.0))

    def __call__(self, x, params=None):
        given = None if params is None else {"params": self.nested(params)}
        return self.model.apply(given or self.state.variables, x)

    def nested(self, params):
        return {n: {"kernel": w} if n in self.layers else w for n, w in params.items()}

    def _step(self, state, x):
        loss = lambda variables, x: loss_of(self.model.apply(variables, x))
        value, grads = jfp8.value_and_grad(loss)(state, x)
        whole = {n: g["kernel"] if isinstance(g, dict) else g for n, g in grads.params.items()}
        return value, whole, state.apply_gradients(grads)

    def states(self):
        flat = flatten_dict(self.state.variables.get("fp8", {})).items()
        return _states((path[:-1], x) for path, x in flat if path[-1] == "amax_history")

    def report(self, x):
        return jfp8.report(self.model, self.state.variables, x)


class Nnx(Converted):
    door = "nnx"

    def start(self, module, x, recipe, options):
        self.graph, self.state = nnx.split(self.convert(module, recipe, *x, **options))

    @property
    def model(self):
        return nnx.merge(self.graph, jax.tree.map(lambda leaf: leaf, self.state))

    def __call__(self, x, params=None):
        model = self.model
        for name, w in (params or {}).items():
            held = getattr(model, name)
            getattr(held, "kernel", held).set_value(w)
        return model(x)

    def _step(self, state, x):
        model = nnx.merge(self.graph, state)
        loss = lambda model, x: loss_of(model(x))
        value, grads = jfp8.nnx.value_and_grad(loss)(model, x)
        whole = {n: grads[n]["kernel"] if n in self.layers else grads[n] for n in self.params}
        return value, {n: g.get_value() for n, g in whole.items()}, nnx.state(model)

    def states(self):
        flat = nnx.to_flat_state(nnx.state(self.model, jfp8.nnx.Fp8State))
        return _states(((*path[:-2], path[-1]), x.get_value()) for path, x in flat)

    def report(self, x):
        return jfp8.report(self.model, x)


def _states(flat: Any) -> dict[str, dict[str, jax.Array]]:
    """Return histories by the name of a weight, and by the tensor."""
    found: dict[str, dict[str, jax.Array]] = {}
    for (*module, product, role), history in flat:
        if role in ROLES:
            own = product.removeprefix("DotGeneral_") if product.startswith("DotGeneral_") else "0"
            name = "/".join([*module, *([] if own == "0" else [own])])
            found.setdefault(name, {})[role] = history
    return found


DOORS = {each.door: each for each in (Function, Linen, Nnx)}


def converted(
    door: str,
    run: Run,
    params: Params,
    x: Any,
    recipe: Any = "current",
    *,
    layers: Collection[str] = (),
    example: bool = True,
    **options: Any,
) -> Converted:
    """Return the model of `run` behind a door, converted.

    In NNX without an `example` all that may become FP8 keeps state, and what is stacked shares it.
    """
    given = (x,) if example else ()
    return DOORS[door](run, params, given if door == "nnx" else x, recipe, layers, options)


def moved(case: Converted) -> set[str]:
    """Return the names of matmuls whose histories of all three tensors have an entry."""
    full = lambda state: all(np.all(np.asarray(state[role])[..., 0] > 0) for role in ROLES)
    return {name for name, state in case.states().items() if full(state)}
