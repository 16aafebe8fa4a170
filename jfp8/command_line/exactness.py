"""Run an operation so that errors show, and compare its results with a reference on the CPU.

Everything runs three times on a GPU and has to give the same bits: a difference between runs is a
race. Before each run NaN is written to the memory that it will get, so that what a kernel leaves
out is not right from the run before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Record = dict[str, Any]
RUNS = 3  # one where kernels are interpreted


def run(function: Callable[..., Any], *arguments: Any) -> list[np.ndarray]:
    """Return the results of `function`, which must be the same each time."""
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
    """Yield the results of `function`, run again and again in memory that holds NaN."""
    program = jax.jit(function).lower(*arguments).compile()
    sizes = [
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(function, *arguments))
    ]
    sizes.append(getattr(program.memory_analysis(), "temp_size_in_bytes", 0))
    for _ in range(RUNS if jax.default_backend() == "gpu" else 1):
        poison(sizes)
        yield program(*arguments)


def poison(sizes: list[int]) -> None:
    """Fill free memory with bytes of 0xFF, NaN in all formats: where arrays of `sizes` will lie.

    An allocator gives what was freed last to whoever asks for as much. The last array is for
    another order, in which these find no room between others.
    """
    wanted = [*sizes, sum(sizes)]
    ones = np.full(max(wanted), 0xFF, np.uint8)
    jax.block_until_ready([jax.device_put(ones[:size]) for size in wanted if size])


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """Interpret Pallas kernels in this context, if the device is a CPU and JAX knows how."""
    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11, 2):
        yield
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    with plgpu.force_gpu_interpret_mode():
        yield


def on_cpu(function: Callable[..., Any], *arguments: Any) -> list[np.ndarray]:
    """Return the results of `function` on the CPU, where arithmetic is as the source says."""
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
        both_nan = np.isnan(as_f32(a.reshape(-1)[wrong])) & np.isnan(as_f32(b.reshape(-1)[wrong]))
        wrong[wrong] = ~both_nan
        if wrong.any():
            at = np.unravel_index(int(wrong.argmax()), a.shape)
            raise AssertionError(
                f"result {index}: {int(wrong.sum())} of {a.size} differ, the first at "
                f"{tuple(map(int, at))}: {a[at]} instead of {b[at]}"
            )


def as_f32(x: np.ndarray) -> np.ndarray:
    """Return the values as f32."""
    return x.astype(np.float32)


def awkward(shape: tuple[int, int], dtype: Any, seed: int) -> np.ndarray:
    """Return random values over many binades, with zeros, values that saturate, NaN and Inf."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 4, shape))
    x[rng.random(shape) < 0.05] = 0
    x[: shape[0] // 4, : shape[1] // 4] = 0  # whole blocks of zeros
    x = x.astype(np.float32)
    x[shape[0] // 2, shape[1] // 3] = np.nan
    x[shape[0] - 1, shape[1] - 1] = -np.inf
    x[shape[0] // 3, 0] = np.inf
    return x.astype(dtype)


def integers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Return small integers: sums of some thousand products of them are exact in 14 bits."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32).astype(dtype)


def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Return normally distributed values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def powers_of_two(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return scales from 1/8 to 8."""
    return np.exp2(np.random.default_rng(seed).integers(-3, 4, shape)).astype(np.float32)


def check_sums(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    draw: Callable[[Callable[..., np.ndarray]], tuple[Any, ...]],
    terms: int,
) -> Record:
    """Compare sums of products with the reference on the CPU.

    Bit for bit on small integers, whose sums are exact in any order; and on normally distributed
    data within the error of tensor cores. These keep 13 fraction bits of the largest of 32 products
    and the running sum, so that each of the ``terms / 32`` additions before a sum is promoted to
    f32 loses at most 2^-12 of the sum of magnitudes. Both results are rounded once.

    Args:
      ours, reference: functions of the operands, linear in each, with the same results.
      draw: makes the operands from a function ``(shape, dtype, seed) -> array``.
      terms: products that are added before their sum is promoted.
    """
    operands = draw(integers)
    same(run(ours, *operands), on_cpu(reference, *operands))
    operands = draw(normal)
    got, expected = run(ours, *operands), on_cpu(reference, *operands)
    magnitudes = on_cpu(reference, *jax.tree.map(magnitude, operands))
    record = {"relative_error": 0.0, "part_of_bound": 0.0}
    for a, b, most in zip(got, expected, magnitudes, strict=True):
        epsilon = float(jnp.finfo(b.dtype).eps)
        a, b, most = (x.astype(np.float64) for x in (a, b, most))
        bound = ((terms / 32 + 1) * 2.0**-12 + 1e-6) * most + epsilon * np.abs(b) + 1e-30
        found = {
            "relative_error": float(np.linalg.norm(a - b) / np.linalg.norm(b)),
            "part_of_bound": float(np.max(np.abs(a - b) / bound)),
        }
        if not found["part_of_bound"] <= 1:  # NaN too
            raise AssertionError(
                "error {part_of_bound:.3g} times the bound, relative {relative_error:.3g}".format(
                    **found
                )
            )
        record = {name: max(record[name], value) for name, value in found.items()}
    return record


def magnitude(x: Any) -> np.ndarray:
    """Return the magnitudes of the values of `x`, in its dtype."""
    return np.abs(as_f32(np.asarray(x))).astype(x.dtype)
