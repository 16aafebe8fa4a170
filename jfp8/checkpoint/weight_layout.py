"""`WeightLayout`: the tensors in which a file for PyTorch holds one quantized weight, as data.

A weight ``W``, ``[..., out, in]``, becomes codes, a scale for each of their blocks, and for NVFP4
one more scale above these. Each lies under the weight's name and a suffix::

    W ~= codes * scale             codes: FP8, or two of FP4 in a byte, the first in its lower half
    W ~= codes * (scale * outer)   scale: E4M3, outer: f32; some files store 1 / outer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jfp8.checkpoint.safetensors_file import joined_nibbles, split_nibbles
from jfp8.checkpoint.state_dict import DTYPES
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E2M1FN, E4M3FN, E8M0FNU
from jfp8.scaling.granularity import Block, ragged_block

_E4M3, _E8M0 = "float8_e4m3fn", E8M0FNU.dtype.name


@dataclass(frozen=True)
class WeightLayout:
    """The layout of one format's weights in a file.

    A suffix that begins with a dot takes the place of ``".weight"``.
    """

    kind: str  # "fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "mxfp4" or "nvfp4"
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale; 0: all, -1: any
    scale_dtype: str = "float32"  # dtype in the file; "uint8" stands for the exponents of E8M0
    scale_ndim: int = 2  # dimensions of a matrix's scales; below 2, sizes of 1 are left out
    suffixes: tuple[str, ...] = ("", "_scale")  # codes, scales and, with two levels, the outer
    packed_dtype: str = "uint8"  # dtype of bytes with two FP4 codes
    reciprocal: bool = False  # the outer scale is f32[1], one divided by it; else f32[]
    grouped: bool = False  # codes have one more dimension, for the bytes of a block
    # The entries of config.json, see serving_formats.toml.
    group: Mapping[str, Any] | None = field(default=None, compare=False)
    calibrated: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def is_mx(self) -> bool:
        """Tell whether scales are exponents, in memory too."""
        return self.kind in ("mxfp8", "mxfp4")

    def shape_of(self, data: Any) -> tuple[int, ...]:
        """Return the shape of the weight whose stored codes are `data`."""
        shape = (*data.shape[:-2], data.shape[-2] * data.shape[-1]) if self.grouped else data.shape
        return (*shape[:-1], 2 * shape[-1]) if self._is_fp4 else shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored scale of a weight of this `shape`."""
        if self.block == (0, 0):
            return (1,) * self.scale_ndim
        full = self._grid(shape)
        return full[:-1] if not self.block[1] and self.scale_ndim < len(shape) else full

    @property
    def codes_dtype(self) -> str:
        """Name of the dtype of stored codes."""
        return self.packed_dtype if self._is_fp4 else _E4M3

    def names_in(self, stored: Mapping[str, Any]) -> list[str]:
        """Return the names of the weights of which all tensors are `stored`."""
        codes, most = self.suffixes[0], 2 + self.grouped
        ends = [n.removesuffix(codes) for n, x in stored.items() if x.ndim >= most]
        return [name for name in ends if all(tensor in stored for tensor in self.tensors(name))]

    def tensors(self, name: str) -> list[str]:
        """Return the names of the tensors that store the weight called `name`."""
        layer = name.removesuffix(".weight")
        return [(layer if suffix.startswith(".") else name) + suffix for suffix in self.suffixes]

    def stored_as(self, scale: Any) -> WeightLayout:
        """Return this layout with the dtype and the dimensions of a stored scale."""
        ndim = self.scale_ndim if self.block[1] else scale.ndim
        return replace(self, scale_dtype=scale.dtype.name, scale_ndim=ndim)

    def holds(self, data: Any, scale: Any, *outer: Any) -> bool:
        """Tell whether stored codes and scales can be of this layout, by dtypes and shapes."""
        scales = ("float32", "bfloat16", "float16", _E8M0)
        if self.is_mx or self._has_outer:
            scales = (_E4M3,) if self._has_outer else ("uint8", _E8M0)
        is_known = data.dtype.name == self.codes_dtype and scale.dtype.name in scales
        if not is_known or any(x.size != 1 for x in outer):
            return False
        return scale.shape == self.scale_shape(self.shape_of(data))

    def join(self, data: Any, scale: Any, outer: Any = None) -> ScaledArray:
        """Join the stored tensors of a weight, which this layout `holds`, to a `ScaledArray`."""
        shape = self.shape_of(data)
        if self._is_fp4:
            data = split_nibbles(data.view(np.uint8)).view(DTYPES["float4_e2m1fn"]).reshape(shape)
        if not self._has_outer:
            scale = scale.view(E8M0FNU.dtype) if self.is_mx else scale.astype(np.float32)
        scale = scale.reshape(() if self.block == (0, 0) else self._grid(shape))
        block = ragged_block(Block(self._sizes(shape)), shape)
        if outer is not None:
            scale = ScaledArray(scale, self._outer(outer.reshape(()).astype(np.float32)))
        return ScaledArray(data, scale, block)

    def split(self, name: str, q: ScaledArray) -> dict[str, np.ndarray] | None:
        """Return the tensors that store the weight `q` under `name`; None if it has other scales.

        Blocks of `q` may be larger than those of the layout: their scales are repeated.
        ``ValueError`` if `scale_dtype` would round them.
        """
        q_scale: Any = q.scale
        scale = np.asarray(q_scale.data if isinstance(q_scale, ScaledArray) else q_scale)
        scale = self._repeated(q, scale) if self._is_format_of(q, scale) else None
        if scale is None:
            return None
        scale = self._narrowed(name, scale).reshape(self.scale_shape(q.shape))
        data = np.asarray(q.data)
        if self._is_fp4:
            data = joined_nibbles(data).view(self.packed_dtype)
        stored = [data.reshape(*scale.shape, -1) if self.grouped else data, scale]
        if self._has_outer:
            outer = self._outer(np.asarray(q_scale.scale, np.float32))
            stored.append(outer.reshape((1,) * self.reciprocal))
        return dict(zip(self.tensors(name), stored, strict=True))

    def fitted(self, q: ScaledArray) -> WeightLayout:
        """Return this layout, with the blocks of `q` if it may have any."""
        has_blocks = self.block == (-1, -1) and np.ndim(q.scale) == q.ndim >= 2
        return replace(self, block=q.block_sizes()[-2:]) if has_blocks else self

    def is_outer_scale(self, stored: np.ndarray, q: ScaledArray) -> bool:
        """Return whether a `stored` outer scale equals the outer scale of `q`."""
        scale: Any = q.scale
        return self.reciprocal and bool(np.all(self._outer(stored) == scale.scale))

    def _outer(self, x: Any) -> Any:
        return np.float32(1) / x if self.reciprocal else x

    def in_words(self) -> str:
        """Name the format, and its blocks, for a message."""
        rows, columns = self.block
        return f"{self.kind} of {rows} x {columns}" if min(self.block) > 0 else self.kind

    @property
    def _is_fp4(self) -> bool:
        return self.kind in ("mxfp4", "nvfp4")

    @property
    def _has_outer(self) -> bool:
        return len(self.suffixes) == 3

    def _is_format_of(self, q: ScaledArray, scale: np.ndarray) -> bool:
        q_scale: Any = q.scale
        if q.format != (E2M1FN if self._is_fp4 else E4M3FN) or q.ndim < 2 or -1 in self.block:
            return False
        if isinstance(q_scale, ScaledArray):
            return self._has_outer and scale.dtype.name == _E4M3 and q_scale.scale.size == 1
        return not self._has_outer and (not self.is_mx or scale.dtype.name == _E8M0)

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = self.block
        return rows or max(shape[-2], 1), columns or max(shape[-1], 1)

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        pairs = zip(shape[-2:], self._sizes(shape), strict=True)
        return (*shape[:-2], *(-(-n // b) for n, b in pairs))

    def _repeated(self, q: ScaledArray, scale: np.ndarray) -> np.ndarray | None:
        """Return a scale for each block of the layout; None if such a block has several."""
        given = q.block_sizes() if scale.ndim else q.shape
        scale = scale if scale.ndim else scale.reshape((1,) * q.ndim)
        stack = q.shape[:-2] if self.block == (0, 0) else (1,) * (q.ndim - 2)
        wanted = (*stack, *self._sizes(q.shape))
        if not self.kind.startswith("fp8") and q.shape[-1] % wanted[-1]:
            return None  # these formats have no blocks that are cut short
        for axis, (n, a, b) in enumerate(zip(q.shape, given, wanted, strict=True)):
            first = np.arange(0, n, b)
            last = np.minimum(first + b, n) - 1
            if not np.array_equal(first // a, last // a):
                return None
            scale = np.take(scale, first // a, axis)
        return scale

    def _narrowed(self, name: str, scale: np.ndarray) -> np.ndarray:
        if self.is_mx or self._has_outer:
            return scale.view(DTYPES[self.scale_dtype])
        wide = scale.astype(np.float32)
        narrow = wide.astype(DTYPES[self.scale_dtype])
        if not np.array_equal(narrow.astype(np.float32), wide, equal_nan=True):
            raise ValueError(
                f"The scales of {name!r} are not numbers of {self.scale_dtype}, in which this "
                "style stores them. Use dataclasses.replace(layout, scale_dtype='float32')."
            )
        return narrow
