"""Measure the effect of quantizing on every operand of every matmul of a program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jfp8.conversion.product_report import Report
from jfp8.conversion.program import arrays_apart
from jfp8.conversion.report import report_of
from jfp8.debug.measurement import Measurement
from jfp8.debug.reading import Tap, by_layer, read
from jfp8.debug.records import TensorStats
from jfp8.layers.nnx.products import Product
from jfp8.products.observers import Observer, observing, tap
from jfp8.quantizers.quantizer import Quantizer
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair, scaled_values
from jfp8.scaling.formats import Format
from jfp8.scaling.parts import apply_scale
from jfp8.tracing.compat import without_dead_code
from jfp8.tracing.notes import explaining

SAMPLE = 16384  # the most elements that a histogram counts


@dataclass(frozen=True)
class _Losses(Measurement):
    """Measure what quantizing did to a tensor, from its data, values and scales.

    ``signal`` and ``noise`` are ``sum(x^2)`` and ``sum((x' - x)^2)``; ``fill`` is the largest
    ``|x| / (format.max * s)``; the bins count exponents of finite f32 numbers, biased. `role` and
    `kinds` are those of `jfp8.products.observers.Observer`.
    """

    sums: ClassVar[tuple[str, ...]] = ("count", "nonfinite", "underflow", "overflow")
    powers: ClassVar[tuple[str, ...]] = ("signal", "noise")
    maxima: ClassVar[tuple[str, ...]] = ("amax", "fill", "scale_max", "minus_scale_min")
    bins: ClassVar[int] = 255

    role: str
    kinds: str
    fmt: Format
    block: tuple[int, ...] | None
    scale: Any  # structure of `ScaledArray.scale`
    history: int  # `jfp8.quantizers.Quantizer.history_len`

    def __call__(self, data: jax.Array, x: jax.Array, *scales: jax.Array) -> jax.Array:
        q = ScaledArray(data, jax.tree.unflatten(self.scale, scales), self.block)
        x = x.astype(jnp.float32)
        values = scaled_values(q)
        s = functools.reduce(jnp.multiply, scale_as_f32_pair(q))
        s = jnp.where(jnp.isfinite(s), s, 0.0)
        finite = jnp.isfinite(x)
        magnitude = jnp.where(finite, jnp.abs(x), 0.0)
        amax = jnp.max(magnitude, initial=0.0)
        limit = np.float32(self.fmt.max) * s
        if s.ndim:
            limit = apply_scale(jnp.ones_like(x), limit, self.block)
        # A value rounds to the largest if it is less than half a unit in the last place above it;
        # at exactly half, if the largest is even.
        ulp = 2.0 ** (self.fmt.max_exponent - self.fmt.mantissa_bits)
        beyond = jnp.greater if self.fmt.max / ulp % 2 == 0 else jnp.greater_equal
        saturated = beyond(magnitude, limit * np.float32(1 + ulp / 2 / self.fmt.max))
        error = jnp.where(finite & jnp.isfinite(values), values - x, 0.0)
        to_units = 1.0 / jnp.maximum(amax, np.finfo(np.float32).tiny)
        count = lambda where: jnp.sum(where.astype(jnp.float32))  # on CPUs faster than integers
        sums = [np.float32(x.size), count(~finite)]
        sums += [count((magnitude > 0) & (values == 0)), count(saturated & (limit > 0))]
        powers = [jnp.sum((part * to_units) ** 2) for part in (magnitude, error)]
        highest = magnitude if s.ndim else amax
        fill = jnp.max(jnp.where(limit > 0, highest / limit, 0.0), initial=0.0)
        maxima = [amax, fill, jnp.max(s, initial=0.0), jnp.max(-s, initial=-jnp.inf)]
        histogram = _histogram(_sampled(magnitude), self.bins)
        return jnp.concatenate([jnp.stack([*sums, *powers, *maxima]), histogram])


def _sampled(x: jax.Array) -> jax.Array:
    """Return at most `SAMPLE` elements: every n-th along the leading dimensions."""
    for axis in range(x.ndim):
        excess = -(-x.size // SAMPLE)
        if excess > 1:
            x = lax.slice_in_dim(x, 0, None, min(excess, x.shape[axis]), axis)
    return x


def _histogram(magnitude: jax.Array, bins: int) -> jax.Array:
    """Count elements by exponent, zeros left out."""
    bits = lax.bitcast_convert_type(magnitude.reshape(-1), jnp.uint32)
    counted = (bits > 0).astype(jnp.float32)
    return jnp.zeros((bins,)).at[(bits >> 23).astype(jnp.int32)].add(counted)


@dataclass(frozen=True)
class _Watcher(Observer):
    """Tap every quantized tensor."""

    def quantized(
        self, role: str, kinds: str, quantizer: Quantizer, x: jax.Array, q: ScaledArray
    ) -> ScaledArray:
        scales, structure = jax.tree.flatten(q.scale)
        losses = _Losses(
            *(role, kinds, q.format, q.block, structure, quantizer.history_len),
            weight=1 if role == "rhs" else None,
            forward=role in ("lhs", "rhs", "y"),
        )
        return replace(q, data=tap(q.data, x, *scales, measure=losses))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stats:
    """Statistics of every quantized tensor in one run of a program.

    A pytree of arrays: it may leave ``jax.jit``, be scanned over, or stay on the device until
    `rows` is called.

    Attributes:
      vectors: measurements, ``f32[*loops, W]`` each.
      places: place of each measurement in the program.
      products: every product of the program, with the reason if it is in high precision.
    """

    vectors: tuple[jax.Array, ...]
    places: tuple[Tap, ...] = field(metadata={"static": True})
    products: Report = field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"Stats({len(self.vectors)} measurements; .rows() gives the numbers)"

    def rows(self, step: int | None = None) -> tuple[TensorStats, ...]:
        """Return the statistics as numbers on the host, in program order.

        Each tensor of each layer has a row, also in layers that a ``scan`` stacks. Uses of a layer,
        iterations of other loops, devices and axes of ``vmap`` are merged.

        Args:
          step: number of the training step, for `TensorStats.step`.

        Raises:
          TypeError: called while JAX traces.
        """
        if any(isinstance(x, jax.core.Tracer) for x in self.vectors):
            raise TypeError(
                "Stats.rows() needs numbers, but is called while JAX traces. Return the Stats from "
                "the function, and call rows() outside jax.jit."
            )
        return tuple(
            _row(tapped, index, vector, step)
            for tapped, index, vector in by_layer(self.places, self.vectors)
            if vector[0] > 0  # the count
        )


def stats(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` also return statistics of what FP8 did to each tensor.

    ``stats(f)(*args) == (f(*args), Stats)``. The statistics are computed in the same program, with
    the same results. Use it in every tenth step or so, or let a `Recorder` do that::

        with_stats = jax.jit(jfp8.debug.stats(step))
        (state, loss), seen = with_stats(state, batch)
        rows += seen.rows(step=i)

    Histograms by exponent count at most 16,384 elements of a tensor; everything else is exact. On
    GPUs tensors are quantized without fused kernels here, to the same numbers.

    Args:
      function: multiplies in FP8: a training step, a loss and its gradient, or a forward pass;
        Linen, NNX, or neither; jitted or not. Gradients are included if it computes them itself.
        Takes and returns pytrees, and NNX objects, which it may change.

    Returns:
      A function of the same arguments that returns ``(results, Stats)``.

    Raises:
      NotImplementedError: there are FP8 matmuls inside something that measurements cannot leave,
        such as a custom loop primitive; the message says which.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> model, x = jfp8.Dense(4), jnp.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> y, seen = jax.jit(jfp8.debug.stats(model.apply))(variables, x)
    >>> [(row.tensor, row.format, row.amax) for row in seen.rows() if row.tensor == "lhs"]
    [('lhs', 'E4M3FN', 1.0)]
    """

    @functools.wraps(function)
    def with_stats(*args: Any, **kwargs: Any) -> tuple[Any, Stats]:
        run = partial(observed, _Watcher())
        if has_nnx((args, kwargs)):
            return calling(function, run, args, kwargs)
        return run(function, *args, **kwargs)

    return with_stats


def observed(
    observer: Observer, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Stats]:
    """Return ``function(*args, **kwargs)``, and the measurements at the taps of `observer`."""
    arrays, together = arrays_apart((args, kwargs))

    def of_arrays(arrays: list[Any]) -> Any:
        args, kwargs = together(arrays)
        return function(*args, **kwargs)

    with observing(observer), explaining():
        closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(arrays)
    closed = without_dead_code(closed)
    outs, found = read(closed, arrays)
    places, vectors = zip(*found) if found else ((), ())
    seen = Stats(vectors, places, report_of(closed))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs), seen


def has_nnx(arguments: Any) -> bool:
    """Look for a module, or another object of NNX, among the arguments."""
    return any(map(_is_nnx, jax.tree.leaves(arguments, is_leaf=_is_nnx)))


def calling(
    function: Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Call ``function(*args, **kwargs)`` through `run`, which takes functions of pytrees only.

    ``run(pure, *arguments)`` returns ``(pure(*arguments), more)``. Returns ``(results, more)``, and
    updates NNX objects among the arguments as `function` does.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_nnx)
    objects = {i: x for i, x in enumerate(leaves) if _is_nnx(x)}
    others = {i: x for i, x in enumerate(leaves) if i not in objects}
    graph, state = nnx.split(objects)

    def pure(state: Any, others: dict[int, Any]) -> Any:
        copies = nnx.merge(graph, state, copy=True)
        name_products(list(copies.values()))
        given = [x for _, x in sorted({**others, **copies}.items())]
        args, kwargs = jax.tree.unflatten(structure, given)
        return function(*args, **kwargs), nnx.state(copies)

    (results, after), more = run(pure, state, others)
    nnx.update(objects, after)
    return results, more


def _is_nnx(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def name_products(objects: list[Any]) -> None:
    """Give products without a path the one that they have in their model."""
    for one in objects:
        for path, node in nnx.iter_graph(one):
            if isinstance(node, Product) and not node.path:
                node.path = "/".join(map(str, path[:-1]))


def _row(tapped: Tap, index: tuple[int, ...], v: np.ndarray, step: int | None) -> TensorStats:
    measure = cast(_Losses, tapped.measure)
    value = measure.named(v)
    count, amax = value["count"], value["amax"]
    finite = max(count - value["nonfinite"], 1.0)
    signal, noise = value["signal"], value["noise"]
    histogram = v[-measure.bins :]
    return TensorStats(
        step=step,
        path=tapped.path,
        index=index,
        tensor=measure.role,
        products=measure.kinds,
        recipe=tapped.recipe,
        format=measure.fmt.name,
        order=tapped.number,
        count=int(count),
        amax=amax,
        scale_min=-value["minus_scale_min"],
        scale_max=value["scale_max"],
        **{name: value[name] / count for name in ("underflow", "overflow", "nonfinite")},
        rms=amax * math.sqrt(signal / finite),
        mse=amax * amax * noise / finite,
        sqnr=_decibels(signal, noise),
        headroom=0.0 - math.log2(value["fill"]) if value["fill"] > 0 else math.inf,
        history=measure.history,
        exponents={int(b) - 127: int(histogram[b]) for b in np.flatnonzero(histogram)},
    )


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf if signal > 0 else math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
