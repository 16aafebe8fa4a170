"""Other shapes for bytes and their scales, where whole blocks stay together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class Reshaped(NamedTuple):
    """Describe scales after their data was reshaped."""

    scale: Shape  # the shape of the scales
    sizes: Shape  # elements that share a scale along each dimension


def reshaped_scales(shape: Shape, sizes: Shape, new: Shape) -> Reshaped | None:
    """Return the scales of data of `shape` in blocks of `sizes` in the shape `new`, or None.

    Dimensions that are merged or split must be in blocks that are runs of consecutive elements, and
    dimensions that a run does not fill must consist of whole runs. So a matrix ``[k, 256]`` in
    blocks of ``128 x 128`` can become ``[k, 4, 64]``, where two heads share a scale, but ``[k,
    384]`` cannot become ``[k, 2, 192]``.
    """
    scale, blocks = [], []
    for old, of_old, others in _groups(shape, sizes, new):
        found = of_old if old == others else _of_run(_run(old, of_old), others)
        if found is None:
            return None
        blocks += found
        scale += [-(-n // b) for n, b in zip(others, found, strict=True)]
    return Reshaped(tuple(scale), tuple(blocks))


def _groups(shape: Shape, sizes: Shape, new: Shape) -> Iterator[tuple[Shape, Shape, Shape]]:
    """The fewest dimensions of `shape` and `new` that hold as many elements, one after another."""
    i = j = 0
    while i < len(shape) or j < len(new):
        first_i, first_j = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(new))
        while (left := math.prod(shape[first_i:i])) != (right := math.prod(new[first_j:j])):
            if left < right:
                i += 1
            else:
                j += 1
        yield shape[first_i:i], sizes[first_i:i], new[first_j:j]


def _run(shape: Shape, sizes: Shape) -> int | None:
    """Count the consecutive elements that share a scale; None if they are not consecutive."""
    run, ended = 1, False
    for axis in reversed(range(len(shape))):
        n, b = shape[axis], min(sizes[axis], shape[axis])
        if n == 1:
            continue
        if ended and b > 1:
            return None
        if n % b and math.prod(shape[:axis]) != 1:
            return None  # a shorter run before the end
        run *= b
        ended = ended or b < n
    return run


def _of_run(run: int | None, shape: Shape) -> Shape | None:
    """Return the blocks of `shape` that are runs of `run` elements."""
    if run is None:
        return None
    sizes, left = [1] * len(shape), run
    for axis in reversed(range(len(shape))):
        n = shape[axis]
        if left % n == 0:
            sizes[axis], left = n, left // n
            continue
        if left > n or (n % left and math.prod(shape[:axis]) != 1):
            return None
        sizes[axis], left = left, 1
    return tuple(sizes)


def reshaped(q: Any, shape: Sequence[int]) -> Any:
    """Return the `ScaledArray` `q` in another shape, bit for bit; blocks are not cut."""
    shape = _full(shape, q.size)
    carrier = None if q.carrier is None else q.carrier.reshape(shape)
    data, scale, block = q.data.reshape(shape), q.scale, None
    if scale.ndim:
        sizes = q.block_sizes()
        found = reshaped_scales(q.shape, sizes, shape)
        if found is None:
            raise ValueError(
                f"An array of shape {q.shape} with a scale for each block of {sizes} cannot have "
                f"the shape {shape}, which cuts blocks. Keep a shape whose dimensions hold whole "
                "blocks, or reshape its values: q.dequantize().reshape(...)."
            )
        scale = scale.reshape(found.scale)
        ragged = any(n % b for n, b in zip(shape, found.sizes, strict=True))
        block = found.sizes if ragged else None
    return replace(q, data=data, scale=scale, block=block, carrier=carrier)


def _full(shape: Sequence[int], size: int) -> Shape:
    """Return `shape` with the number in place of a -1; it must hold `size` elements."""
    rest = math.prod(n for n in shape if n != -1)
    found = tuple(size // max(rest, 1) if n == -1 else n for n in shape)
    if math.prod(found) != size or list(shape).count(-1) > 1:
        raise ValueError(f"{size} elements cannot have the shape {tuple(shape)}.")
    return found
