"""Quantizing in GB/s, by our kernels and by XLA, next to a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jfp8
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.granularity import Block
from jfp8.scaling.scales import amax
from on_gpu.cases import Case, Group, Settings
from on_gpu.kernels import from_amax, kernel
from on_gpu.timing import chained, copies, random


def quantize(settings: Settings) -> Iterator[Group]:
    """Section: bf16 matrices to f8, in one direction and in both."""
    shapes = [(128, 128)] if settings.smoke else [(8192, 8192), (15872, 4096), (4096, 4096)]
    for shape in shapes:
        yield Group(f"{shape[0]}x{shape[1]}", list(_cases(shape, settings)), "copy")


def _cases(shape: tuple[int, int], settings: Settings) -> Iterator[Case]:
    m, n = shape
    inputs = copies(lambda i: random(shape, jnp.bfloat16, seed=i), settings)
    one = jnp.float32(1.5)
    rows, columns = (jnp.linspace(0.5, 2.0, size, dtype=jnp.float32) for size in shape)

    def case(
        name: str,
        function: Callable[..., Any],
        bytes_per_element: float,
        *others: jax.Array,
        kernels: tuple[str, ...] = (),
    ) -> Case:
        """`bytes_per_element` is the least that has to be read and written."""

        def prepare():
            arguments = [(x, *others) for x in inputs()]
            return chained(function, arguments, settings, bytes=int(bytes_per_element * m * n))

        return Case(name, prepare, kernels)

    def ours(name: str, what: str, bytes_per_element: float, *others: Any, **options: Any) -> Case:
        arrays = [o for o in others if isinstance(o, jax.Array)]
        rest = others[len(arrays) :]
        call = lambda x, *arrays: kernel(name)(x, *arrays, *rest, **options)
        label = f"{name} {what}".strip()
        return case(label, call, bytes_per_element, *arrays, kernels=(name,))

    yield case("copy", jnp.copy, 4)
    scale = {"fmt": E4M3FN, "scale_of": from_amax(E4M3FN), "with_amax": True}
    yield ours("quantize_tensor", "with amax", 4, one.reshape(1), **scale)
    yield ours("quantize_lines", "", 4, rows, columns, E4M3FN)
    yield ours("quantize_rows_in_blocks", "1x128", 4 + 8 / 128, E4M3FN, 128, "power_of_two")
    yield ours("quantize_rows_in_blocks", "1x32 E8M0", 4 + 2 / 32, E4M3FN, 32, "rceil")
    yield ours("quantize_tiles", "128x128", 4, E4M3FN, "power_of_two")
    yield ours("tensor_amax", "", 2, jnp.zeros(1))
    yield ours("row_and_column_amax", "", 2)
    yield case("XLA one scale, amax", _xla_quantize, 3, one)
    yield case("XLA one scale, both directions, amax", _xla_quantize_both, 4, one)
    yield case("XLA amax", amax, 2)
    if not settings.smoke:
        yield case("XLA 1x128, one direction", _xla_blocks, 3 + 4 / 128)


def _xla_quantize(x: jax.Array, scale: jax.Array) -> Any:
    return jfp8.quantize(x, scale=scale).data, amax(x)


def _xla_quantize_both(x: jax.Array, scale: jax.Array) -> Any:
    q = jfp8.quantize(x, scale=scale).data
    return q, q.T, amax(x)


def _xla_blocks(x: jax.Array) -> Any:
    return jfp8.quantize(x, granularity=Block((1, 128)), scale_rounding="power_of_two")
