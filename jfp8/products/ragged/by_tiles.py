"""`GroupedDot`: multiply each tile of rows by the matrix of its group."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.explained import explained
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.dot_general import Dot
from jfp8.products.operation import Kind, Operand, Operation
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_of, codes_to_format
from jfp8.scaling.formats import Format, format_of
from jfp8.scaling.random_bits import fold_in
from jfp8.scaling.scales import amax
from jfp8.tracing.compat import same_varying_axes


@dataclass(frozen=True)
class Grouped(Operation):
    """Base class of grouped matmuls, ``y[t] = lhs[t, h, k] . rhs[group[t], k, n]``."""

    group: jax.Array  # i32[t], the group of each tile
    padded_sizes: jax.Array  # i32[g], number of rows in the tiles of each group

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return {"fprop": ((2,), (1,)), "dgrad": ((2,), (2,)), "wgrad": ((1,), (1,))}[kind]

    @classmethod
    def dimensions(cls, kind: Kind) -> tuple[str, str, str]:
        """Name the dimensions of both operands and the result, as quantized and laid out.

        ``t`` tiles (or their rows), ``h`` rows of a tile, ``E`` groups, ``k`` and ``n``.
        """
        return {
            "fprop": ("thk", "Ekn", "thn"),
            "dgrad": ("thn", "Ekn", "thk"),
            "wgrad": ("thk", "thn", "Ekn"),
        }[kind]

    def terms(self, kind: Kind) -> int:
        """Return the exact number of terms; in wgrad the average, including padded rows."""
        (tiles, height, k), (groups, _, n) = self.shapes
        return {"fprop": k, "dgrad": n, "wgrad": tiles * height // groups}[kind]


grouped_operation = functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["group", "padded_sizes"],
    meta_fields=["shapes", "dtypes"],
)


@grouped_operation
@dataclass(frozen=True)
class GroupedDot(Grouped):
    """A matmul of each tile of rows with the matrix of its group."""

    def quantize(self, role: str, x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
        """Quantize by the quantizer; rhs group by group, each with its own amax and no history."""
        if role != "rhs":
            return super().quantize(role, x, quantizer, at)
        return quantized_by_group(x, quantizer, at)

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        by_xla = spec.implementation is None and spec.accumulation == "f32"
        why = "bf16: no FP8 kernel for these groups on this GPU" if by_xla else "emulate"
        with explained(why, first, second):
            y = self.by_tiles(kind, first, second, spec)
        return y.astype(self.dtype_of(kind))

    def by_tiles(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        """Multiply one tile at a time with the reference implementation, in f32."""
        (_, height, k), (groups, _, n) = self.shapes
        group, f32 = self.group, np.dtype(np.float32)
        dot = Dot(((height, k), (k, n)), (f32, f32, f32), (((1,), (0,)), ((), ())))
        spec = replace(spec, implementation="emulate")
        tiles, others = _Stack(first), _Stack(second)
        product = lambda a, b: dot.multiply(kind, a, b, spec)
        indices = jnp.arange(group.shape[0])
        if kind != "wgrad":
            return lax.map(lambda i: product(tiles[i], others[group[i]]), indices)

        def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return total.at[group[i]].add(product(tiles[i], others[i])), None

        zeros = jnp.zeros((groups, k, n), jnp.float32)
        zeros, *_ = same_varying_axes((zeros, first, second, group))
        return lax.scan(add, zeros, indices)[0]


def quantized_by_group(x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
    """Return the matrices ``[g, k, n]``, each quantized separately."""
    contracting = tuple(d - 1 for d in at.contracting)

    def quantize_one(x: jax.Array, group: jax.Array) -> ScaledArray:
        seed = None if at.seed is None else fold_in(at.seed, group)
        return quantizer(x, Context(contracting, amax(x), None, seed))

    q = jax.vmap(quantize_one)(x, jnp.arange(x.shape[0], dtype=jnp.uint32))
    block = None if q.block is None else (1, *q.block)
    return ScaledArray(q.data, with_all_dims(q.scale, x.ndim), block)


class _Stack:
    """A stack of matrices, `ScaledArray`s or not, from which a loop reads one at a time.

    8-bit data is passed to the loop as uint8, because XLA:CPU would widen f8 arrays.
    """

    def __init__(self, x: Operand) -> None:
        leaves, self.structure = jax.tree.flatten(x)
        self.formats = [format_of(a.dtype) if a.dtype.itemsize == 1 else None for a in leaves]
        self.leaves = [
            a if fmt is None else codes_of(a) for a, fmt in zip(leaves, self.formats, strict=True)
        ]

    def __getitem__(self, i: jax.Array) -> Operand:
        def item(leaf: jax.Array, fmt: Format | None) -> jax.Array:
            # A single scale for all has no dimensions; along a dimension of size 1 every index
            # gives entry 0.
            leaf = lax.dynamic_index_in_dim(leaf, i, keepdims=False) if leaf.ndim else leaf
            return leaf if fmt is None else codes_to_format(leaf, fmt)

        x = self.structure.unflatten(map(item, self.leaves, self.formats))
        if isinstance(x, ScaledArray) and x.block is not None:
            x = replace(x, block=x.block[1:])
        return x


def with_all_dims(scale: jax.Array | ScaledArray, ndim: int) -> jax.Array | ScaledArray:
    """Return the scale of a stack of arrays, to which `jax.vmap` added a leading dimension."""
    if isinstance(scale, ScaledArray):
        return replace(scale, scale=with_all_dims(scale.scale, ndim))
    return scale if scale.ndim == ndim else lax.expand_dims(scale, range(1, ndim))
