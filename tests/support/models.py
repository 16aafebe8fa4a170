"""Models of one function, and their training."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import optax

import jfp8


class Model(nn.Module):
    """A model whose call is `run`, a function of the module and of the inputs."""

    run: Callable[..., Any]

    @nn.compact
    def __call__(self, *inputs, **options):
        return self.run(self, *inputs, **options)


def trained(loss_fn, variables, batch, steps=1, lr=0.05) -> jfp8.TrainState:
    """Return the state after some steps of a loss of variables and a batch."""
    state = jfp8.TrainState.create(apply_fn=loss_fn, variables=variables, tx=optax.sgd(lr))

    @jax.jit
    def step(state):
        return state.apply_gradients(jfp8.value_and_grad(loss_fn)(state, batch)[1])

    for _ in range(steps):
        state = step(state)
    return state


def gradients_of(function):
    """`function` of some operands as one of these and a cotangent: result and all gradients."""

    def f(*operands_and_dy):
        *operands, dy = operands_and_dy
        y, back = jax.vjp(function, *operands)
        return y, *back(dy)

    return f


PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}


def jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns")):
        leaf = getattr(leaf, "jaxpr", leaf)
        if hasattr(leaf, "eqns"):
            yield leaf


def products_in(jaxpr, in_loops=False) -> Counter[str]:
    """Count products of FP8 as ``fprop``, ``dgrad``, ``wgrad``, others as ``plain``.

    Those `in_loops` count once for each turn of a scan.
    """
    found = Counter()
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", ""))
        inside = [products_in(inner, in_loops) for inner in jaxprs_in(eqn.params)]
        if name.startswith("jfp8_"):
            # Remat and loops leave an empty call of a product that need not be repeated.
            found[name.split("_")[1]] += any(inside)
        elif eqn.primitive.name in PRODUCTS:
            found["plain"] += 1
        else:
            times = eqn.params["length"] if in_loops and eqn.primitive.name == "scan" else 1
            for counts in inside:
                found.update({kind: times * n for kind, n in counts.items()})
    return found
