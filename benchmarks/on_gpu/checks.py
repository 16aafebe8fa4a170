"""Whether each kernel computes the right thing on the current device.

Quantize kernels must agree bit for bit with `jfp8.quantize` and its parts on a CPU. Products are
compared with float64 twice: bit for bit on small integers, whose sums are all exact in any order;
and on random data within the error that tensor cores may make. Everything runs three times and has
to give the same bits: a difference between runs is a race. Before each run NaN is written to the
memory that it will get, so that what a kernel leaves out is not right from the run before.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jfp8
from jfp8.scaling.formats import E4M3FN, E5M2, E8M0FNU, Format
from jfp8.scaling.granularity import Block, PerAxis
from jfp8.scaling.parts import expand_scale
from jfp8.scaling.quantization import block_scale
from jfp8.scaling.scales import amax, quantize_with_scale, reciprocal, scale_from_amax
from on_gpu.cases import Case, Group, Settings
from on_gpu.harness import running
from on_gpu.records import Record
from on_gpu.shapes import name_of, shapes
from on_gpu.timing import memory

RUNS = 3  # one where kernels are interpreted
_MODULES = (
    "hopper.quantize",
    "hopper.quantize_blocks",
    "hopper.matmul",
    "hopper.grouped",
    "scales_in_kernels",
)


def kernel(name: str) -> Callable[..., Any]:
    """Return a function of `jfp8.kernels` by its name."""
    for module in _MODULES:
        found = importlib.import_module(f"jfp8.kernels.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise NotImplementedError(f"There is no kernel called {name}.")


def run(function: Callable[..., Any], *arguments: Any) -> list[np.ndarray]:
    """The results of `function`, which must be the same each time."""
    first, *others = [
        [np.asarray(leaf) for leaf in jax.tree.leaves(results)]
        for results in poisoned_runs(function, *arguments)
    ]
    for other in others:
        for a, b in zip(first, other, strict=True):
            if a.tobytes() != b.tobytes():
                raise AssertionError("two runs on the same data differ: a race")
    return first


def poisoned_runs(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """The results of `function`, run again and again in memory that holds NaN."""
    compiled = jax.jit(function).lower(*arguments).compile()
    sizes = [
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(function, *arguments))
    ]
    sizes.append((memory(compiled) or {}).get("temporaries") or 0)
    running()
    for _ in range(RUNS if jax.default_backend() == "gpu" else 1):
        poison(sizes)
        yield compiled(*arguments)


def poison(sizes: list[int]) -> None:
    """Fill free memory with bytes of 0xFF, NaN in all formats: where arrays of `sizes` will lie.

    An allocator gives what was freed last to whoever asks for as much. The last array is for
    another order, in which these find no room between others.
    """
    wanted = [*sizes, sum(sizes)]
    ones = np.full(max(wanted), 0xFF, np.uint8)
    jax.block_until_ready([jax.device_put(ones[:size]) for size in wanted if size])


def check_poison() -> Record:
    """The share of a result that a program leaves as it finds it, and that was poisoned."""
    shape = (4096, 4096)
    found = [
        float(jnp.mean(jnp.isnan(x)))
        for x in poisoned_runs(lambda: jax.lax.empty(shape, jnp.bfloat16))
    ]
    return {"poisoned": min(found)}


def on_cpu(function: Callable[..., Any], *arguments: Any) -> list[np.ndarray]:
    """The results of `function` on the CPU, where arithmetic is as the source says."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arguments = jax.tree.map(np.asarray, arguments)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*arguments))]


def same(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Raise unless all are equal bit for bit, NaN for NaN."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(
                f"result {index} is {a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
            )
        bits = [x.reshape(-1).view(np.uint8).reshape(x.size, x.dtype.itemsize) for x in (a, b)]
        wrong = (bits[0] != bits[1]).any(axis=1)
        both_nan = np.isnan(_f32(a.reshape(-1)[wrong])) & np.isnan(_f32(b.reshape(-1)[wrong]))
        wrong[wrong] = ~both_nan
        if wrong.any():
            at = np.unravel_index(int(wrong.argmax()), a.shape)
            raise AssertionError(
                f"result {index}: {int(wrong.sum())} of {a.size} differ, the first at "
                f"{tuple(map(int, at))}: {a[at]} instead of {b[at]}"
            )


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


# Quantize kernels.


def awkward(shape: tuple[int, int], dtype: Any, seed: int) -> jax.Array:
    """Random values over many binades, with zeros, values that saturate, NaN and Inf."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 4, shape))
    x[rng.random(shape) < 0.05] = 0
    x[: shape[0] // 4, : shape[1] // 4] = 0  # whole blocks of zeros
    x = x.astype(np.float32)
    x[shape[0] // 2, shape[1] // 3] = np.nan
    x[shape[0] - 1, shape[1] - 1] = -np.inf
    x[shape[0] // 3, 0] = np.inf
    return jnp.asarray(x).astype(dtype)


def check_tensor_amax(x: jax.Array) -> Record:
    unless = lambda known: known[0] > 0
    f = lambda x, known: largest(kernel("tensor_amax")(x, known, unless=unless))
    same(run(lambda x: largest(kernel("tensor_amax")(x)), x), on_cpu(amax, x))
    same(run(f, x, jnp.float32([2])), [np.zeros((), np.float32)])
    same(run(f, x, jnp.float32([0])), on_cpu(amax, x))
    return {}


def largest(amaxes: jax.Array) -> jax.Array:
    """The amax of a tensor from the bits of those of its parts."""
    return jax.lax.bitcast_convert_type(jnp.max(amaxes), jnp.float32)


def check_row_and_column_amax(x: jax.Array, sweep: Any = None) -> Record:
    def reference(x):
        return amax(x, PerAxis(0))[:, 0], amax(x, PerAxis(1))[0]

    ours = lambda x: kernel("row_and_column_amax")(x, sweep=sweep)
    same(run(ours, x), on_cpu(reference, x))
    return {}


def from_amax(fmt: Format) -> Callable[..., Any]:
    """What makes a scale in `quantize_tensor`: from one amax."""
    make = kernel("scale_and_inverse")
    return lambda known: make(jnp.full((128,), known[0]), fmt, None, poison=False)


def check_quantize_tensor(x: jax.Array, fmt: Format, with_amax: bool, sweep: Any = None) -> Record:
    known = jnp.float32([3.7])  # some saturate

    def ours(x, known):
        options = {"fmt": fmt, "scale_of": from_amax(fmt), "with_amax": with_amax, "sweep": sweep}
        q, q_t, scale, *amaxes = kernel("quantize_tensor")(x, known, **options)
        return q, q_t, scale, *map(largest, amaxes)

    def reference(x, known):
        scale = scale_from_amax(known, fmt)
        q = _codes(x, reciprocal(scale[0]), fmt)
        return (q, q.T, scale, amax(x)) if with_amax else (q, q.T, scale)

    same(run(ours, x, known), on_cpu(reference, x, known))
    return {}


def check_quantize_lines(x: jax.Array, fmt: Format, sweep: Any = None) -> Record:
    rng = np.random.default_rng(5)
    rows, columns = (
        jnp.asarray(rng.uniform(0.5, 300, size), jnp.float32).at[0].set(1.0) for size in x.shape
    )

    def ours(x, rows, columns):
        return kernel("quantize_lines")(x, rows, columns, fmt, sweep=sweep)

    def reference(x, rows, columns):
        return _codes(x, rows[:, None], fmt), _codes(x, columns[None], fmt).T

    same(run(ours, x, rows, columns), on_cpu(reference, x, rows, columns))
    return {}


def _codes(x: jax.Array, inverse: jax.Array, fmt: Format) -> jax.Array:
    """``cast(x * inverse)``, where what is not finite becomes NaN."""
    # With `inverse`, whoever calls has made non-finite blocks NaN; here none does.
    q = quantize_with_scale(x, jnp.ones_like(inverse), fmt, inverse=inverse).data
    bits = jax.lax.bitcast_convert_type(q, jnp.uint8)
    bits = jnp.where(jnp.isfinite(x), bits, np.uint8(fmt.nan_code))
    return jax.lax.bitcast_convert_type(bits, fmt.dtype)


def check_quantize_rows_in_blocks(
    x: jax.Array, fmt: Format, block: int, rounding: str | None, sweep: Any = None
) -> Record:
    def ours(x):
        return kernel("quantize_rows_in_blocks")(x, fmt, block, rounding, sweep=sweep)

    def reference(x):
        q, s = _in_blocks(x, fmt, Block((1, block)), rounding)
        q_t, s_t = _in_blocks(x, fmt, Block((block, 1)), rounding)
        return q, s.T, q_t.T, s_t

    same(run(ours, x), on_cpu(reference, x))
    return {}


def check_quantize_tiles(
    x: jax.Array, fmt: Format, rounding: str | None, sweep: Any = None
) -> Record:
    def ours(x):
        return kernel("quantize_tiles")(x, fmt, rounding, sweep=sweep)

    def reference(x):
        q, s = _in_blocks(x, fmt, Block((128, 128)), rounding)
        return q, q.T, s

    same(run(ours, x), on_cpu(reference, x))
    return {}


def _in_blocks(x: jax.Array, fmt: Format, granularity: Block, rounding: Any) -> Any:
    scale, block, inverse = block_scale(x, fmt, granularity, rounding)
    q = quantize_with_scale(x, scale, fmt, block=block, inverse=inverse)
    # A block without a scale is NaN as a whole; `quantize_with_scale` leaves its zeros as they are,
    # which makes no difference to the values.
    lost = jnp.isnan(expand_scale(inverse, x.shape, granularity.shape))
    bits = jax.lax.bitcast_convert_type(q.data, jnp.uint8)
    bits = jnp.where(lost, np.uint8(fmt.nan_code), bits)
    if scale.dtype == E8M0FNU.dtype:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return jax.lax.bitcast_convert_type(bits, fmt.dtype), scale


def quantize_cases(settings: Settings) -> list[list[Case]]:
    """For each kind of input."""
    f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
    if settings.smoke:
        inputs = [((72, 136), bf16)]
    else:
        ragged, large = (1000, 1544), (4096, 8192)
        inputs = [(ragged, bf16), (large, bf16), (ragged, f32), (ragged, f16)]
    found = []
    for index, (shape, dtype) in enumerate(inputs):
        where = f"{shape[0]}x{shape[1]} {np.dtype(dtype).name}"
        x = functools.cache(functools.partial(awkward, shape, dtype, 1))
        every = index == 0 and not settings.smoke
        found.append(list(_quantize_cases_of(x, where, every)))
    return found


def _quantize_cases_of(x: Callable[[], jax.Array], where: str, every: bool) -> Iterator[Case]:
    def case(function: Callable[..., Record], what: str, *arguments: Any) -> Case:
        name = function.__name__.removeprefix("check_")
        label = ", ".join(part for part in (what, where) if part)
        return Case(f"{name}: {label}", lambda: function(x(), *arguments), (name,))

    yield case(check_tensor_amax, "")
    yield case(check_row_and_column_amax, "")
    for fmt in (E4M3FN, E5M2):
        yield case(check_quantize_tensor, fmt.name, fmt, True)
        yield case(check_quantize_lines, fmt.name, fmt)
        yield case(check_quantize_rows_in_blocks, f"{fmt.name}, 1x128", fmt, 128, "power_of_two")
        yield case(check_quantize_rows_in_blocks, f"{fmt.name}, 1x32 rceil", fmt, 32, "rceil")
        yield case(check_quantize_tiles, f"{fmt.name}", fmt, "power_of_two")
        if every:
            yield case(check_quantize_tensor, f"{fmt.name}, no amax", fmt, False)
            yield case(check_quantize_rows_in_blocks, f"{fmt.name}, 1x128 f32", fmt, 128, None)
            yield case(check_quantize_tiles, f"{fmt.name}, f32", fmt, None)
            for mode in ("floor", "ceil", "even"):
                yield case(check_quantize_rows_in_blocks, f"{fmt.name}, {mode}", fmt, 32, mode)
        else:
            return  # one format is enough there


# Products.


def integers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Small integers: sums of a few thousand products of them are exact in 14 bits."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32).astype(dtype)


def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def powers_of_two(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.exp2(np.random.default_rng(seed).integers(-3, 4, shape)).astype(np.float32)


def product_error(
    got: np.ndarray, a: np.ndarray, b: np.ndarray, chunk: int | None, out_dtype: Any
) -> Record:
    """Hold `got` to ``a @ b.T`` in float64, for values `a` and `b`.

    A tensor core keeps 13 fraction bits of the largest of 32 products and the running sum, so that
    each of the ``chunk / 32`` additions before a promotion (over all of K if None) loses at most
    2^-12 of the sum of magnitudes; the result is rounded once.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    expected, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
    k = a.shape[1]
    additions = math.ceil(min(k, chunk or k) / 32) + 1
    epsilon = float(jnp.finfo(out_dtype).eps)
    bound = (additions * 2.0**-12 + 1e-6) * magnitude + epsilon * np.abs(expected) + 1e-30
    error = np.abs(got.astype(np.float64) - expected)
    worst = float(np.max(error / bound))
    relative = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    if not worst <= 1:  # NaN too
        raise AssertionError(f"error {worst:.3g} times the bound, relative {relative:.3g}")
    return {"relative_error": relative, "part_of_bound": worst}


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Scales of blocks, spelled out for the elements of an array of `shape`."""
    for axis, size in enumerate(shape):
        if scale.shape[axis] != size:
            scale = np.take(scale, np.arange(size) // 128, axis)
    return scale


def check_matmul(
    m: int,
    n: int,
    k: int,
    dtypes: tuple[Any, Any],
    out: Any,
    promote: bool,
    rows: bool,
    tiles: Any = None,
) -> Record:
    def ours(a, b, row, column):
        return kernel("matmul")(a, b, row, column, out, promote=promote, tiles=tiles)

    row, column = (powers_of_two((size,) if rows else (), s) for size, s in ((m, 3), (n, 4)))
    record: Record = {}
    for make in (integers, normal):
        a, b = make((m, k), dtypes[0], 1), make((n, k), dtypes[1], 2)
        (got,) = run(ours, a, b, row, column)
        left, right = _f32(a) * row.reshape(-1, 1), _f32(b) * column.reshape(-1, 1)
        if make is integers:
            same([got], [(left.astype(np.float64) @ right.T.astype(np.float64)).astype(out)])
        else:
            record = product_error(got, left, right, 128 if promote else None, out)
    return record


def check_block_matmul(
    m: int, n: int, k: int, dtypes: tuple[Any, Any], out: Any, by_tile: bool, tiles: Any = None
) -> Record:
    blocks = math.ceil(k / 128)
    a_scale = powers_of_two((blocks, m), 3)
    b_scale = powers_of_two((blocks, math.ceil(n / 128) if by_tile else n), 4)

    def ours(a, b, s, t):
        return kernel("block_matmul")(a, b, s, t, out, tiles=tiles)

    record: Record = {}
    for make in (integers, normal):
        a, b = make((m, k), dtypes[0], 1), make((n, k), dtypes[1], 2)
        (got,) = run(ours, a, b, a_scale, b_scale)
        left = _f32(a) * spread(a_scale.T, (m, k))
        right = _f32(b) * spread(b_scale.T, (n, k))
        if make is integers:
            same([got], [(left.astype(np.float64) @ right.T.astype(np.float64)).astype(out)])
        else:
            record = product_error(got, left, right, 128, out)
    return record


def check_grouped_matmul(groups: int, tiles: int, n: int, k: int, scaled: bool) -> Record:
    out, blocks = jnp.float32, math.ceil(k / 128)
    group = np.sort(np.random.default_rng(7).integers(0, groups, tiles)).astype(np.int32)
    a_scale = powers_of_two((blocks, tiles * 128), 3)
    b_scale = powers_of_two((groups, blocks, math.ceil(n / 128)), 4)
    scales = (a_scale if scaled else None, b_scale)

    def ours(a, b, group, scales):
        return kernel("grouped_matmul")(a, b, group, *scales, out)

    record: Record = {}
    for make in (integers, normal):
        a = make((tiles * 128, k), E4M3FN.dtype, 1)
        b = make((groups, n, k), E4M3FN.dtype, 2)
        (got,) = run(ours, a, b, group, scales)
        left, right = _f32(a), _f32(b)
        right = right * spread(b_scale.transpose(0, 2, 1), right.shape)
        if scaled:
            left = left * spread(a_scale.T, left.shape)
        for t, g in enumerate(group):
            part = slice(t * 128, (t + 1) * 128)
            if make is integers:
                expected = left[part].astype(np.float64) @ right[g].T.astype(np.float64)
                same([got[part]], [expected.astype(np.float32)])
            else:
                record = product_error(got[part], left[part], right[g], 128, out)
    return record


def check_grouped_outer(groups: int, tiles: int, m: int, n: int, scaled: bool) -> Record:
    out = jnp.float32
    count = np.bincount(np.random.default_rng(7).integers(1, groups, tiles), minlength=groups)
    count = count.astype(np.int32)  # none in the first group
    first = (np.cumsum(count) - count).astype(np.int32)
    a_scale, b_scale = powers_of_two((tiles, m), 3), powers_of_two((tiles, n), 4)
    scales = (a_scale, b_scale if scaled else None)

    def ours(a, b, first, count, scales):
        return kernel("grouped_outer")(a, b, first, count, *scales, out)

    record: Record = {}
    for make in (integers, normal):
        a = make((m, tiles * 128), E4M3FN.dtype, 1)
        b = make((n, tiles * 128), E5M2.dtype, 2)
        (got,) = run(ours, a, b, first, count, scales)
        left, right = _f32(a), _f32(b)
        left = left * spread(a_scale.T, left.shape)
        if scaled:
            right = right * spread(b_scale.T, right.shape)
        for g in range(groups):
            part = slice(first[g] * 128, (first[g] + count[g]) * 128)
            if make is integers or not count[g]:
                expected = left[:, part].astype(np.float64) @ right[:, part].T.astype(np.float64)
                same([got[g]], [expected.astype(np.float32)])
            else:
                record = product_error(got[g], left[:, part], right[:, part], 128, out)
    return record


def product_cases(settings: Settings) -> Iterator[Case]:
    four, five = E4M3FN.dtype, E5M2.dtype
    # The last is about as large as is quick in float64 on a CPU.
    shapes = [(1000, 1544, 1096), (512, 768, 1024), (2048, 2048, 2048)]
    if settings.smoke:
        shapes = [(72, 136, 200)]

    def case(name: str, what: str, check: Callable[[], Record]) -> Case:
        return Case(f"{name}: {what}", check, (name,))

    mixes = [((four, four), jnp.bfloat16), ((four, five), jnp.float32), ((five, four), jnp.float16)]
    for shape in shapes:
        size = "x".join(map(str, shape))
        for dtypes, out in mixes[: 3 if shape == (1000, 1544, 1096) else 1]:
            what = f"{'x'.join(np.dtype(d).name.removeprefix('float8_') for d in dtypes)}, {size}"
            for promote, rows in ((False, False), (True, True), (False, True), (True, False)):
                if not settings.smoke or promote == rows:
                    label = f"{'promoted' if promote else 'running'} sum, {what}"
                    label += ", rows" if rows else ""
                    check = functools.partial(check_matmul, *shape, dtypes, out, promote, rows)
                    yield case("matmul", label, check)
            for by_tile in (True,) if settings.smoke else (True, False):
                label = f"b in {'128x128' if by_tile else '1x128'}, {what}"
                check = functools.partial(check_block_matmul, *shape, dtypes, out, by_tile)
                yield case("block_matmul", label, check)
    n, k = (128, 256) if settings.smoke else (1544, 1096)
    for scaled in (True,) if settings.smoke else (True, False):
        label = "scaled" if scaled else "not scaled"
        yield case(
            "grouped_matmul", label, functools.partial(check_grouped_matmul, 3, 4, n, k, scaled)
        )
        yield case(
            "grouped_outer", label, functools.partial(check_grouped_outer, 3, 4, 136, n, scaled)
        )


def scales_of(kind: str, m: int, n: int, k: int) -> list[jax.Array]:
    """Ones and twos in the shapes of scales of blocks; for scales of whole operands, 2 and 1/4."""
    blocks = math.ceil(k / 128)
    sizes = {
        "block": ((blocks, m), (blocks, math.ceil(n / 128))),
        "block_columns": ((blocks, m), (blocks, n)),
    }.get(kind)
    if sizes is None:
        return [jnp.float32(2), jnp.float32(0.25)]
    return [
        jax.random.randint(jax.random.key(i), size, 1, 3).astype(jnp.float32)
        for i, size in enumerate(sizes)
    ]


def product(
    kind: str, tiles: Any, a: jax.Array, b: jax.Array, row: jax.Array, column: jax.Array
) -> jax.Array:
    """The kernel of a `kind` of product, as it is timed; results in bf16."""
    if kind in ("block", "block_columns"):
        return kernel("block_matmul")(a, b, row, column, jnp.bfloat16, tiles=tiles)
    promote = kind == "promoted"
    return kernel("matmul")(a, b, row, column, jnp.bfloat16, promote=promote, tiles=tiles)


def check_large(kind: str, m: int, n: int, k: int, tiles: Any = None) -> Record:
    """A product of integers at a size that is timed, and so with its tiles, held to XLA's in bf16.

    Both are exact: all sums stay below 2^13.
    """
    keys = jax.random.split(jax.random.key(2))
    a, b = (
        jax.random.randint(key, (size, k), -2, 3).astype(E4M3FN.dtype)
        for key, size in zip(keys, (m, n), strict=True)
    )
    scales = scales_of(kind, m, n, k)

    @jax.jit
    def differ(a, b, row, column, y):
        a, b = (x.astype(jnp.bfloat16) for x in (a, b))
        if row.ndim:
            a = a * jnp.repeat(row.T, 128, 1)[:, :k].astype(jnp.bfloat16)
            column = column.T if kind == "block_columns" else jnp.repeat(column.T, 128, 0)[:n]
            b = b * jnp.repeat(column, 128, 1)[:, :k].astype(jnp.bfloat16)
        scale = 1 if row.ndim else row * column
        expected = jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(~(y == (expected * scale).astype(jnp.bfloat16)))  # NaN too

    for y in poisoned_runs(functools.partial(product, kind, tiles), a, b, *scales):
        if wrong := int(differ(a, b, *scales, y)):
            raise AssertionError(f"{wrong} of {m * n} differ")
    return {}


def large_cases(settings: Settings) -> Iterator[Case]:
    for shape in shapes(settings):
        for kind in ("running", "promoted", "block")[: 1 if settings.smoke else 3]:
            name = "block_matmul" if kind == "block" else "matmul"
            check = functools.partial(check_large, kind, *shape)
            yield Case(f"{name}: {kind} sum, {name_of(shape)}", check, (name,))


# The public functions, by every way to compute them.

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8")
IMPLEMENTATIONS = (None, "xla", "mosaic_gpu")
# Scales that vary along the contraction, in blocks that no kernel of theirs takes.
_REFUSED = {("block", "xla"), ("mxfp8", "xla"), ("mxfp8", "mosaic_gpu")}


def check_gradients(shape: tuple[int, int, int], recipe: str, implementation: Any) -> Record:
    """A product and its gradients, held to the emulated ones on the CPU.

    The quantized operands are the same, so only the order of additions differs, and what a tensor
    core cuts off: 1 % is far above that, and far below what a wrong scale or operand would do.
    """
    m, k, n = shape
    x, w, dy = (normal(s, jnp.bfloat16, i) for i, s in enumerate(((m, k), (k, n), (m, n))))

    def products(x, w, dy, implementation):
        dot = functools.partial(
            jfp8.scaled_dot_general,
            dimension_numbers=(((1,), (0,)), ((), ())),
            recipe=jfp8.recipes.get(recipe),
            implementation=implementation,
        )
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(dy)

    got = run(functools.partial(products, implementation=implementation), x, w, dy)
    expected = on_cpu(functools.partial(products, implementation="emulate"), x, w, dy)
    record = {}
    for name, a, b in zip(("y", "dx", "dw"), got, expected, strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        relative = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        record[name] = relative
        if not relative < 1e-2:
            raise AssertionError(f"{name} is off by {relative:.3g}")
    return {"relative_error": max(record.values()), **record}


def public_cases(settings: Settings) -> Iterator[Case]:
    shape = (128, 256, 128) if settings.smoke else (1000, 1544, 1096)
    for recipe in RECIPES[:1] if settings.smoke else RECIPES:
        for implementation in IMPLEMENTATIONS[-1:] if settings.smoke else IMPLEMENTATIONS:
            if (recipe, implementation) in _REFUSED:
                continue
            check = functools.partial(check_gradients, shape, recipe, implementation)
            size = "x".join(map(str, shape))
            yield Case(f"{recipe}, implementation={implementation}, {size}", check)


def checks(settings: Settings) -> Iterator[Group]:
    """Section: the kernels, then the functions that use them."""
    first, *others = quantize_cases(settings)
    if not settings.smoke:  # a CPU writes zeros
        yield Group("memory", [Case("what no program wrote", check_poison)])
    yield Group("quantize kernels", first)
    yield Group("products", list(product_cases(settings)))
    yield Group("scaled_dot_general with gradients", list(public_cases(settings)))
    yield Group("products as large as those that are timed", list(large_cases(settings)))
    if others:
        yield Group("quantize kernels, other inputs", [case for o in others for case in o])
