"""`value_and_grad`: one step of an NNX model, histories of gradients included."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import filterlib

from jfp8.layers.nnx.moe import RouterBias
from jfp8.layers.nnx.products import Fp8Sink, Fp8State, Product
from jfp8.optim.finite import (
    all_squares_finite,
    if_finite,
    nan_unless,
    scaled,
    unscaled,
)
from jfp8.optim.fp8_params import carriers, with_carriers
from jfp8.scaling.history import (
    as_read,
    choose,
    fingerprint,
    intact,
    largest_of_devices,
    largest_of_examples,
)
from jfp8.scaling.sink import ROLES
from jfp8.scaling.trees import is_scaled_array
from jfp8.tracing.caller import user_level
from jfp8.tracing.loss import LOSS, Loss
from jfp8.training.end_of_step import decode_all, end_together, rescaled
from jfp8.training.micro_batches import over_micro_batches
from jfp8.training.model_histories import merged, over_products, zero_sink
from jfp8.training.state import TrainState
from jfp8.training.step import check_examples, check_micro_batches

Path = tuple[Any, ...]
_SCALED = "jfp8.nnx.value_and_grad(f, loss_scale=scale)"


def value_and_grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    loss_scale: jax.typing.ArrayLike | None = None,
    micro_batches: int = 1,
    batch_axes: Mapping[str, None] | None = None,
) -> Callable[..., Any]:
    """Differentiate as ``flax.nnx.value_and_grad``, and record the amaxes of gradients.

    A call is one step of every FP8 matmul among the differentiated arguments: it reads all three
    histories, gradients included, and each gets one entry, the largest amax of all its uses. If the
    loss or a gradient is not finite, or an operand of a product was not, the histories stay as they
    were, and so do running statistics (``nnx.BatchStat``) and biases of routers; the gradients then
    contain NaN, so that `jfp8.nnx.Optimizer` skips the step.

    Products of frozen layers, whose parameters get no gradient, record lhs and rhs if the gradient
    passes through them, as under ``nnx.grad``; no backward pass is added for them.

    Args:
      f: see ``nnx.value_and_grad``; left out, a decorator is returned.
      argnums: see ``nnx.value_and_grad``: the arguments to differentiate with respect to; in
        models among them, to the ``nnx.Param`` or what ``nnx.DiffState`` says; also those in FP8.
      has_aux: whether `f` returns ``(loss, aux)``.
      loss_scale: a factor for the loss, a scalar that may change from step to step. The returned
        gradients are of the scaled loss, as an optimizer with `jfp8.loss_scale` takes them;
        the returned loss is not scaled. Histories of gradients do not depend on the factor. If you
        scaled the loss in `f` instead, they would be outdated whenever the scale changes.
      micro_batches: split every argument without a model into so many parts, along the leading axes
        of its arrays (scalars stay whole); differentiate for one after the other, in a ``scan``,
        and average losses and gradients, in f32. Weights are quantized once, and each history gets
        one entry. ``aux`` has a leading axis of that size.
      batch_axes: arguments, or keys in them, whose arrays have no batch axis and stay whole:
        ``{"class_weights": None}``.

    Returns:
      A function with the arguments of `f` that returns ``(loss, grads)`` or ``((loss, aux),
      grads)``, just as ``nnx.value_and_grad`` does; no FP8 state is in them.

    Raises:
      TypeError: a Linen model or state; an argument by keyword that `f` cannot take by position.
      ValueError: `micro_batches` is no int of at least 1, or does not divide the batch.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> model = jfp8.nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> loss, grads = jfp8.nnx.value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((2, 3)))
    >>> sorted(grads)
    ['bias', 'kernel']
    """
    if f is None:
        how: Any = {"argnums": argnums, "has_aux": has_aux, "loss_scale": loss_scale}
        parts: Any = {"micro_batches": micro_batches, "batch_axes": batch_axes}
        return partial(value_and_grad, **how, **parts)
    check_micro_batches(micro_batches)
    single = isinstance(argnums, int | nnx.DiffState)
    wanted, shifted = _differentiated((argnums,) if single else argnums)

    @wraps(f)
    def compute(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        args = _checked(_positional(f, args, kwargs), wanted)
        products = training_products(args)
        stored = [(product.histories(), product._check()) for product in products.values()]
        before = dict(zip(products, over_products(intact, stored), strict=True))
        kept = [(x, x.get_value()) for x in _statistics(args, wanted)]
        trained = {path[:end] for path in _trained(args, wanted) for end in range(1, len(path))}
        with_sink = [path for path in products if path[:-1] in trained]
        to_read = [(before[path],) for path in with_sink]
        reads = over_products(partial(_to_read, loss_scale), to_read)

        def with_sinks(sinks: list[jax.Array], *args: Any) -> Any:
            here = training_products(args)
            for path, sink in zip(with_sink, sinks, strict=True):
                here[path].fp8_sink = Fp8Sink(sink)
            _overwrite([here[path] for path in with_sink], reads)
            try:
                returned = f(*args)
            finally:
                for path in with_sink:
                    here[path].fp8_sink = None
            loss, aux = returned if has_aux else (returned, None)
            return scaled(loss, loss_scale), (loss, aux)

        gradient = partial(_gradient, with_sinks, (0, *shifted))
        sinks = [zero_sink(before[path]["grad"]) for path in with_sink]
        if micro_batches > 1:
            like = [carriers(nnx.state(args[w.argnum - 1], w.filter)) for w in shifted]
            gradient = _of_parts(gradient, f, like, micro_batches, batch_axes)
        with LOSS(Loss(loss_scale is not None, _SCALED)):
            (loss, aux), rows, grads = gradient(sinks, *args)
        decoded, overflow = decode_all(rows)
        # A loss, and a saturating cast, may hide an Inf from the gradients that optimizers see.
        sound = jnp.all(jnp.isfinite(loss)) & ~overflow
        grads = nan_unless(sound, grads)
        of_loss = unscaled(grads, None if loss_scale is None else jnp.asarray(loss_scale))
        failed = ~(sound & all_squares_finite(of_loss))  # merged with the optimizer's check
        _end_step(products, before, stored, dict(zip(with_sink, decoded)), failed, loss_scale)
        _put_back(kept, failed)
        return (loss, aux) if has_aux else loss, grads[0] if single else tuple(grads)

    return compute


def _differentiated(entries: Any) -> tuple[tuple[nnx.DiffState, ...], tuple[nnx.DiffState, ...]]:
    """Return `entries` of ``argnums`` with filters; and the same behind an argument of sinks."""
    filtered = lambda e: e if isinstance(e, nnx.DiffState) else nnx.DiffState(e, nnx.Param)
    wanted = tuple(map(filtered, entries))
    no_state = nnx.Not((Fp8State, Fp8Sink))  # filters by path would take it for parameters
    return wanted, tuple(nnx.DiffState(w.argnum + 1, nnx.All(w.filter, no_state)) for w in wanted)


def _overwrite(products: Iterable[Product], states: Sequence[tuple[Any, jax.Array]]) -> None:
    for product, state in zip(products, states, strict=True):
        product._overwrite(*state)


def _to_read(loss_scale: Any, histories: dict[str, jax.Array]) -> Any:
    """Return the histories as the scaled loss reads them, and a check that nobody looks at."""
    read = as_read(histories)
    new = {**read, "grad": rescaled(read["grad"], loss_scale)}
    return new, jnp.zeros(new["lhs"].shape[:-1], jnp.float32)


def _put_back(kept: Sequence[tuple[nnx.Variable, Any]], failed: jax.Array) -> None:
    """Give Variables the values that were kept, if bool[] `failed` on any device."""
    for variable, value in kept:
        anywhere = _on_any_device(failed, value)
        variable.set_value(if_finite(~anywhere, variable.get_value(), value))


def _gradient(f: Callable[..., Any], argnums: Any, sinks: list[jax.Array], *args: Any) -> Any:
    """Return ``(loss, aux)``, the sinks with all amaxes, and gradients.

    `f` is a function ``(sinks, *args) -> scaled loss, (loss, aux)``.
    """
    trained = _trained((sinks, *args), argnums[1:])
    in_fp8 = {path: v for path, v in trained.items() if is_scaled_array(v.get_value())}
    params = [variable.get_value() for variable in in_fp8.values()]

    def with_values(sinks: list[jax.Array], *args: Any) -> Any:
        nodes = dict(nnx.iter_graph((sinks, *args), graph=True))
        here = [nodes[path] for path in in_fp8]
        with _holding(here, with_carriers(params, [v.get_value() for v in here])):
            return f(sinks, *args)

    how: Any = {"has_aux": True, "graph": True, "graph_updates": True}
    differentiate = nnx.value_and_grad(with_values, argnums=argnums, **how)
    with _holding(in_fp8.values(), carriers(params)):
        (_, aux), (cotangents, *grads) = differentiate(sinks, *args)
    return aux, cotangents, grads


@contextlib.contextmanager
def _holding(variables: Iterable[nnx.Variable], values: Any) -> Iterator[None]:
    before = [(variable, variable.get_value()) for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable.set_value(value)
        yield
    finally:
        for variable, value in before:
            variable.set_value(value)


def _of_parts(
    gradient: Callable[..., Any],
    f: Callable[..., Any],
    like: list[Any],
    micro_batches: int,
    batch_axes: Mapping[str, None] | None,
) -> Callable[..., Any]:
    """Return `gradient` of the means over parts of the batch: of all arguments without a model."""

    def compute(sinks: list[jax.Array], *args: Any) -> tuple[Any, Any, Any]:
        names = list(inspect.signature(f).bind(*args).arguments)
        names = [*names, *map(str, range(len(names), len(args)))]
        holds = [any(map(_is_node, jax.tree.leaves(arg, is_leaf=_is_node))) for arg in args]
        models = tuple(arg for arg, is_model in zip(args, holds, strict=True) if is_model)
        graphdef, params, others = nnx.split(models, nnx.Param, ...)

        def of_part(params: Any, sinks: Any, others: Any, part: dict[str, Any]) -> Any:
            merged = nnx.merge(graphdef, params, others)
            here = iter(merged)
            of_names = zip(names, holds, strict=True)
            given = [next(here) if is_model else part[name] for name, is_model in of_names]
            (loss, aux), rows, grads = gradient(sinks, *given)
            return (grads, rows), (loss, nnx.state(merged, nnx.Not(nnx.Param)), aux)

        batch = {n: arg for n, arg, m in zip(names, args, holds, strict=True) if not m}
        how = (micro_batches, batch_axes or {}, "jfp8.nnx.value_and_grad(f")
        varying = ((like, sinks), (params, sinks), others, batch)
        (grads, rows), (loss, others, aux) = over_micro_batches(of_part, *how, *varying)
        nnx.update(models, others)
        return (loss, aux), rows, grads

    return compute


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)


def _statistics(args: tuple[Any, ...], wanted: Sequence[nnx.DiffState]) -> list[nnx.Variable]:
    """List what follows the data in the models, besides histories."""
    nodes = [node for w in wanted for _, node in nnx.iter_graph(args[w.argnum], graph=True)]
    return [node for node in nodes if isinstance(node, nnx.BatchStat | RouterBias)]


def _end_step(
    products: Any, before: Any, stored: Any, seen: Any, failed: jax.Array, loss_scale: Any
) -> None:
    """Give `products` their histories after a step, or those `stored` before one that failed."""
    ends = [_end_of(p, before[path], seen.get(path)) for path, p in products.items()]
    kept = []
    for new, old in zip(over_products(partial(_ended, loss_scale), ends), stored):
        like = old[0]["lhs"]
        anywhere = _on_any_device(largest_of_examples(failed, like), like)
        # Outside of the stacks, so that XLA may overwrite the histories of a donated state.
        kept.append(merged(choose(~anywhere, new, old)))
    _overwrite(products.values(), kept)


def _end_of(product: Product, before: Any, amaxes: Any) -> tuple[Any, ...]:
    if amaxes is None:
        return before, product.histories(), None
    return before, None, largest_of_examples(amaxes, before["lhs"])


def _ended(loss_scale: Any, before: Any, after: Any, amaxes: Any) -> Any:
    """Return histories after a step, and the `fingerprint` of what is kept.

    Without amaxes f32[..., 3], of the scaled loss, calls recorded themselves what is in `after`.
    """
    new = after
    if amaxes is not None:
        one = jnp.float32(1.0)
        units = jnp.stack([one, one, one if loss_scale is None else jnp.float32(loss_scale)])
        none = jnp.zeros(amaxes.shape[:-1], jnp.float32)
        states = {role: {"amax_history": before[role], "amax": none} for role in ROLES}
        ended = end_together(states, amaxes / jnp.broadcast_to(units, amaxes.shape))
        new = {role: state["amax_history"] for role, state in ended.items()}
    return new, fingerprint(new)


def _on_any_device(flag: jax.Array, like: jax.Array) -> jax.Array:
    """Return True if bool[] `flag` is, on any device that shares `like`."""
    return largest_of_devices(flag.astype(jnp.float32), like) > 0


def _positional(f: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of `f` in order, also those that were given by name."""
    if not kwargs:
        return tuple(args)
    bound = inspect.signature(f).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"jfp8.nnx.value_and_grad, like that of Flax, needs to pass {sorted(bound.kwargs)} by "
            "position, which the function does not allow. Leave out the * in its signature."
        )
    return bound.args


def _checked(args: tuple[Any, ...], wanted: Sequence[nnx.DiffState]) -> tuple[Any, ...]:
    """Return `args`, or raise for a Linen state or model, or a batch without examples."""
    for entry in wanted:
        given = args[entry.argnum]
        variables = isinstance(given, Mapping) and given.keys() >= {"params", "fp8"}
        if variables or isinstance(given, TrainState | nn.Module):
            kind = "tree of variables" if variables else type(given).__name__
            raise TypeError(
                f"jfp8.nnx.value_and_grad differentiates NNX models, but got a Linen {kind}. Use "
                "jfp8.value_and_grad(loss_fn)(state, batch), where state is a jfp8.TrainState."
            )
        nodes = [node for _, node in nnx.iter_graph(given, graph=True)]
        types = {type(node) for node in nodes if isinstance(node, nnx.Variable)}
        if any(nnx.variable_name_from_type(t, allow_register=True) == "fp8" for t in types):
            warnings.warn(
                "A Linen layer in this NNX model (nnx.bridge.ToNNX) keeps amax histories in its "
                "'fp8' collection, which jfp8.nnx.value_and_grad does not update: its scales are "
                "current. Use a layer of jfp8.nnx, or recipe='current', which keeps none.",
                stacklevel=user_level(),
            )
    leaves = jax.tree.leaves(args, is_leaf=_is_node)
    check_examples([leaf for leaf in leaves if not _is_node(leaf)])
    return args


def training_products(args: tuple[Any, ...]) -> dict[Path, Product]:
    """Find the products with state, by their paths in `args`."""
    return {
        path: node
        for path, node in nnx.iter_graph(args, graph=True)
        if isinstance(node, Product) and node.fp8 is not None
    }


def _trained(args: tuple[Any, ...], wanted: Sequence[nnx.DiffState]) -> dict[Path, nnx.Variable]:
    """Find the differentiated Variables by their paths in `args`."""
    return {
        (entry.argnum, *path): node
        for entry in wanted
        for path, node in nnx.iter_graph(args[entry.argnum], graph=True)
        if isinstance(node, nnx.Variable) and filterlib.to_predicate(entry.filter)(path, node)
    }
