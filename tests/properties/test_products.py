"""Products of drawn dimension numbers, sizes and layouts of scales, against float64 bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, E8M0FNU, ScaledArray, scaled_dot_general, scaled_matmul
from jfp8.scaling.formats import Format
from support.arrays import f64, spread, values_of
from support.fake_quantization import VARIANTS, oracle

pytestmark = pytest.mark.property

UNIT = 2.0**-24  # unit roundoff of f32
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
HARDWARE = (E4M3FN, E5M2)
seeds = st.integers(0, 2**32 - 1)


class Dims(NamedTuple):
    """Shapes of two operands, and which of their dimensions are what."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    numbers: tuple

    def free(self, side: int) -> tuple[int, ...]:
        taken = self.numbers[0][side] + self.numbers[1][side]
        return tuple(d for d in range(len(self[side])) if d not in taken)

    def sizes(self) -> tuple[int, int, int, int]:
        """b, m, n, k of the product of matrices that it is."""
        (contract, _), (batch, _) = self.numbers
        of_lhs = (batch, self.free(0), contract)
        b, m, k = (math.prod(self.lhs[d] for d in dims) for dims in of_lhs)
        return b, m, math.prod(self.rhs[d] for d in self.free(1)), k

    def out_shape(self) -> tuple[int, ...]:
        batch = tuple(self.lhs[d] for d in self.numbers[1][0])
        free = (tuple(self[side][d] for d in self.free(side)) for side in (0, 1))
        return sum(free, batch)

    def as_matrices(self, lhs, rhs, dy=None):
        """``[b, m, k]``, ``[b, k, n]`` and ``[b, m, n]``; contracted dimensions in pairs' order."""
        (lc, rc), (lb, rb) = self.numbers
        b, m, n, k = self.sizes()
        lhs = np.asarray(lhs).transpose(lb + self.free(0) + lc).reshape(b, m, k)
        rhs = np.asarray(rhs).transpose(rb + rc + self.free(1)).reshape(b, k, n)
        return (lhs, rhs) if dy is None else (lhs, rhs, np.asarray(dy).reshape(b, m, n))

    def back(self, y, d_lhs, d_rhs):
        """The same way back, for results."""
        (lc, rc), (lb, rb) = self.numbers
        lhs_order, rhs_order = lb + self.free(0) + lc, rb + rc + self.free(1)

        def undo(x, shape, order):
            x = x.reshape([shape[d] for d in order])
            return x.transpose(np.argsort(order).astype(int))

        d_lhs, d_rhs = undo(d_lhs, self.lhs, lhs_order), undo(d_rhs, self.rhs, rhs_order)
        return y.reshape(self.out_shape()), d_lhs, d_rhs


def random_dims(seed, contracted=(1, 2, 3, 7, 33, 40), others=(1, 2, 3, 5)) -> Dims:
    """Up to two dimensions a sort, from a seed: hypothesis seldom draws what goes wrong."""
    rng = np.random.default_rng(seed)  # or a generator, which stays what it is
    n_contract, n_batch = rng.choice([0, 1, 2], p=[0.1, 0.4, 0.5]), rng.choice([0, 1, 2])
    contract, batch = rng.choice(contracted, n_contract), rng.choice(others, n_batch)
    shared = [*batch.tolist(), *contract.tolist()]
    if shared and rng.random() < 1 / 8:
        shared[rng.integers(len(shared))] = 0
    shapes, places = [], []
    for _ in range(2):
        n_free = rng.integers(0, min(4 - len(shared), 2) + 1)
        sizes = shared + rng.choice(others, n_free).tolist()
        place = rng.permutation(len(sizes)).tolist()  # where dimension i of `sizes` stands
        shapes.append(tuple(size for _, size in sorted(zip(place, sizes, strict=True))))
        places.append(place)
    end = len(shared)
    (lc, lb), (rc, rb) = ((tuple(p[n_batch:end]), tuple(p[:n_batch])) for p in places)
    return Dims(*shapes, ((lc, rc), (lb, rb)))


@dataclass(frozen=True)
class Layout:
    """The format of an operand and of its scales; a block size for each dimension, or one scale."""

    fmt: Format
    kind: str
    block: tuple[int, ...] | None

    def operand(self, shape, rng) -> ScaledArray:
        """Normal numbers in `fmt`, with scales around one; its values are `values` below."""
        data = values_to(rng.normal(size=shape) * 4, self.fmt)
        if self.block is None:
            return ScaledArray(data, self.scale((), rng))
        counts = tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))
        ragged = any(n % b for n, b in zip(shape, self.block, strict=True))
        return ScaledArray(data, self.scale(counts, rng), self.block if ragged else None)

    def scale(self, shape, rng):
        if self.kind == "e8m0":
            return jnp.asarray(
                np.asarray(rng.integers(124, 130, shape), np.uint8).view(E8M0FNU.dtype)
            )
        if self.kind == "two-level":
            narrow = rng.uniform(1, 448, shape).astype(E4M3FN.dtype)
            return ScaledArray(jnp.asarray(narrow), jnp.float32(rng.uniform(1, 2) / 448))
        return jnp.asarray(rng.uniform(0.25, 2, shape), jnp.float32)

    def varies_along(self, shape, contract) -> bool:
        """Whether its scales cannot leave the sum."""
        return self.block is not None and any(-(-shape[d] // self.block[d]) != 1 for d in contract)


def values_to(x, fmt):
    """`x` to the nearest of the values of `fmt`; the codes of E3M4 by definition, cut off."""
    if fmt is not E3M4:
        return jnp.asarray(np.clip(x, -fmt.max, fmt.max).astype(fmt.dtype))
    table = values_of(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt)
    code = np.searchsorted(table, np.abs(x), side="right") - 1
    return jnp.asarray((code | (np.signbit(x) << 7)).astype(np.uint8))


def values(q) -> np.ndarray:
    """``data * scale`` in float64, by numpy and ml_dtypes."""
    data = values_of(q.data, E3M4) if q.data.dtype == np.uint8 else f64(q.data)
    scale = values(q.scale) if isinstance(q.scale, ScaledArray) else f64(q.scale)
    return data * spread(scale, data.shape, q.block)


@st.composite
def operands(draw):
    """Dimensions, and a layout for each operand."""
    d = draw(seeds.map(random_dims))
    layouts = []
    for shape in (d.lhs, d.rhs):
        block = st.tuples(*[st.sampled_from([1, 2, 3, 16, 32, 128]) for _ in shape])
        layouts.append(
            Layout(
                draw(st.sampled_from([E4M3FN, E4M3FN, E5M2, E3M4, E2M1FN])),
                draw(st.sampled_from(["f32", "e8m0", "two-level"])),
                draw(st.none() | block),
            )
        )
    return d, *layouts


matmul = jax.jit(
    scaled_matmul,
    static_argnames=(
        "dimension_numbers",
        "accumulation",
        "implementation",
        "preferred_element_type",
    ),
)


def with_half_an_ulp(bound, exact, dtype):
    """The bound of an f32 result, once it is rounded to `dtype`."""
    if dtype == jnp.float32:
        return bound
    info = jnp.finfo(dtype)
    return bound + float(info.eps) / 2 * (np.abs(exact) + bound) + float(info.smallest_subnormal)


def assert_within(result, exact, bound):
    assert result.shape == exact.shape
    wrong = ~(np.abs(f64(result) - exact) <= bound)
    assert not wrong.any(), f"{f64(result)[wrong]} instead of {exact[wrong]} +- {bound[wrong]}"


@given(operands(), seeds, st.sampled_from(DTYPES), st.sampled_from(["f32", "f32_every_128"]))
def test_scaled_matmul_is_the_product_of_the_values(drawn, seed, dtype, accumulation):
    """|y - exact| <= (n + 8) u sum|a b|, by both backends, where `n` additions follow each other.

    Those are K in f32, and 128 within a chunk with one for each chunk. The 8 are the roundings of
    products, of up to four factors of scales, and of their products with each other. XLA's backend
    says no where it should: to formats without hardware, chunks, and scales that stay in the sum.
    """
    d, *layouts = drawn
    rng = np.random.default_rng(seed)
    q = [layout.operand(shape, rng) for layout, shape in zip(layouts, d[:2], strict=True)]
    a, b = d.as_matrices(*map(values, q))
    exact, magnitude = (np.matmul(f(a), f(b)).reshape(d.out_shape()) for f in (np.array, np.abs))
    k = d.sizes()[3]
    n = k if accumulation == "f32" else min(k, 128) + math.ceil(k / 128)
    bound = with_half_an_ulp((n + 8) * UNIT * magnitude, exact, dtype)
    options = {"accumulation": accumulation, "preferred_element_type": dtype}
    y = matmul(*q, d.numbers, implementation="emulate", **options)
    assert y.dtype == dtype
    assert_within(y, exact, bound)

    inside = any(
        layout.varies_along(shape, contract)
        for layout, shape, contract in zip(layouts, d[:2], d.numbers[0], strict=True)
    )
    hardware = all(layout.fmt in HARDWARE for layout in layouts)
    if accumulation == "f32" and hardware and not inside:
        by_xla = matmul(*q, d.numbers, implementation="xla", **options)
        assert by_xla.dtype == dtype
        assert_within(by_xla, exact, bound)
    else:
        with pytest.raises(NotImplementedError, match="'xla' does not support"):
            matmul.lower(*q, d.numbers, implementation="xla", **options)


# scaled_dot_general and its gradients, under every recipe


@partial(jax.jit, static_argnames=("numbers", "recipe", "implementation", "dtype"))
def value_and_grads(lhs, rhs, dy, *, numbers, recipe, implementation, dtype):
    def f(lhs, rhs):
        return scaled_dot_general(
            *(lhs, rhs, numbers),
            recipe=recipe,
            implementation=implementation,
            preferred_element_type=dtype,
        )

    y, vjp = jax.vjp(f, lhs, rhs)
    return y, *vjp(dy)


def sample(shape, rng, dtype, *, exact) -> np.ndarray:
    """Normal numbers, some larger, in 64ths, of which sums of 16 are exact in f32.

    Unless that is asked for, with magnitudes that differ along some dimensions: a format of eight
    bits has the range to hide a scale that is shared along the wrong one.
    """
    x = rng.normal(size=shape) * rng.choice([0.25, 1, 1, 4], shape)
    x, binades = np.round(x * 64) / 64, 8 if dtype == jnp.float16 else 24
    for axis, n in enumerate(shape):
        if not exact and rng.random() < 0.7:
            along = [n if d == axis else 1 for d in range(len(shape))]
            x = x * np.exp2(-rng.integers(0, binades, along))
    return x.astype(dtype)


# Rounding of results is tested in tests/recipes.
PLAIN_RESULTS = [name for name, (_, rules) in VARIANTS.items() if rules.outputs is None]
# One of each kind of scale, block and rotation.
DAILY = (
    *("delayed", "rowwise, high-precision wgrad", "block, tiles in wgrad", "mxfp8, 2d, hybrid"),
    *("nvfp4, nearest", "mxfp4, options off", "qat, nvfp4", "unscaled", "per operand"),
)
# Scales that may vary along a sum, and E2M1.
NOT_BY_XLA = ("block", "mxfp8", "mxfp4", "nvfp4", "qat", "per operand")


@pytest.mark.parametrize(
    "variant", [v if v in DAILY else pytest.param(v, marks=pytest.mark.slow) for v in PLAIN_RESULTS]
)
@settings(max_examples=max(settings.default.max_examples // 8, 1))  # per recipe
@given(
    st.sampled_from(["emulate", "xla", None]),
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    st.none() | st.sampled_from(DTYPES),
    seeds,
)
def test_scaled_dot_general_is_fake_quantization(variant, implementation, dtypes, preferred, seed):
    """The value and both gradients: products of what the recipe makes of the operands."""
    (recipe, rules), rng = VARIANTS[variant], np.random.default_rng([seed, len(variant)])
    d = random_dims(rng, contracted=(1, 2, 5, 9, 33), others=(1, 2, 3, 17))
    out = preferred or jnp.promote_types(*dtypes)
    lhs, rhs, dy = (
        sample(shape, rng, dtype, exact=rules.rotate_wgrad)
        for shape, dtype in zip((*d[:2], d.out_shape()), (*dtypes, out), strict=True)
    )
    results = value_and_grads(
        *(lhs, rhs, dy),
        numbers=d.numbers,
        recipe=recipe,
        implementation=None if variant.startswith(NOT_BY_XLA) else implementation,
        dtype=preferred,
    )
    matrices = d.as_matrices(*(x.astype(np.float32) for x in (lhs, rhs, dy)))
    expected = oracle(rules, *matrices).values()
    exact, bounds = (d.back(*parts) for parts in zip(*expected, strict=True))
    for result, value, bound, dtype in zip(results, exact, bounds, (out, *dtypes), strict=True):
        assert result.dtype == dtype
        assert_within(result, value, with_half_an_ulp(bound, value, dtype))
