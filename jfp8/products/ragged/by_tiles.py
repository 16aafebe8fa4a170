"""`GroupedDot`: the product of each tile of rows with the matrix of its group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.backend import Backend, facts_of
from jfp8.kernels.choice import Implementation, in_rounds, tiles_or_groups
from jfp8.matmul.spec import Job, scale_products, to_output, varies_along
from jfp8.products.dot import Dot
from jfp8.products.operation import Kind, Operand, Operation, Sums
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair, scaled_values
from jfp8.scaling.casts import codes_of, codes_to_format, decode
from jfp8.scaling.formats import Format, format_of
from jfp8.scaling.random_bits import fold_in
from jfp8.scaling.scales import amax
from jfp8.tracing.compat import same_varying_axes


@dataclass(frozen=True)
class Grouped(Operation):
    """The base of both ways to compute grouped products, ``y[t] = lhs[t] . rhs[group[t]]``.

    Attributes:
      shapes: of lhs ``[t, h, k]`` and rhs ``[g, k, n]``.
      dtypes: of lhs, rhs and y.
      implementation: see `scaled_ragged_dot`.
      group: i32[t], the group of each tile.
      padded_sizes: i32[g], the rows of all tiles of each group.
      scales: those of an rhs that came quantized with one for each group: f32[g, 1, 1].
    """

    implementation: Implementation
    group: jax.Array
    padded_sizes: jax.Array
    scales: jax.Array | None = None

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return {"fprop": ((2,), (1,)), "dgrad": ((2,), (2,)), "wgrad": ((1,), (1,))}[kind]

    @classmethod
    def dimensions(cls, kind: Kind) -> tuple[str, str, str]:
        """What the dimensions of both operands and the result are, as quantized and laid out.

        ``t`` tiles, or their rows, ``h`` rows of a tile, ``E`` groups, ``k`` and ``n``.
        """
        return {
            "fprop": ("thk", "Ekn", "thn"),
            "dgrad": ("thn", "Ekn", "thk"),
            "wgrad": ("thk", "thn", "Ekn"),
        }[kind]

    def terms(self, kind: Kind) -> int:
        """The exact number; in wgrad the average, including the zeros that fill up tiles."""
        (tiles, height, k), (groups, _, n) = self.shapes
        return {"fprop": k, "dgrad": n, "wgrad": tiles * height // groups}[kind]


grouped_operation = functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["group", "padded_sizes", "scales"],
    meta_fields=["shapes", "dtypes", "implementation"],
)


@grouped_operation
@dataclass(frozen=True)
class GroupedDot(Grouped):
    """The product of each tile of rows with the matrix of its group."""

    def quantize(self, role: str, x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
        """As the quantizer says; rhs group by group, each with its own amax and no history."""
        if role != "rhs":
            return quantizer(x, at)
        contracting = tuple(d - 1 for d in at.contracting)

        def quantize_one(x: jax.Array, group: jax.Array) -> ScaledArray:
            seed = None if at.seed is None else fold_in(at.seed, group)
            return quantizer(x, Context(contracting, amax(x), None, seed))

        q = jax.vmap(quantize_one)(x, jnp.arange(x.shape[0], dtype=jnp.uint32))
        block = None if q.block is None else (1, *q.block)
        return ScaledArray(q.data, with_all_dims(q.scale, x.ndim), block)

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        if self.scales is not None and isinstance(second, ScaledArray):
            second = ScaledArray(second.data, self.scales)
        dtype = self.dtype_of(kind)
        return tiles_or_groups(
            lambda a, b: self._by_tiles(kind, a, b, sums).astype(dtype),
            lambda a, b: self._by_groups(kind, a, b).astype(dtype),
            first,
            second,
            accumulation=sums.accumulation,
            implementation=self.implementation,
            by_rounds=self._rounds(kind, first, second, sums),
        )

    def _rounds(
        self, kind: Kind, first: Operand, second: Operand, sums: Sums
    ) -> tuple[Backend, Callable[..., jax.Array]] | None:
        """A backend that multiplies a tile of each group at once, and `by_rounds` with it."""
        if not isinstance(first, ScaledArray) or not isinstance(second, ScaledArray):
            return None
        # Sums over tiles are in f32; other products are written once.
        dtype = np.dtype(np.float32) if kind == "wgrad" else self.dtype_of(kind)
        job = Job(_ROWS_IN_BATCHES, dtype, *sums[:-1])
        a, b = jax.eval_shape(lambda a, b: self._of_round(kind, a, b, 0)[:2], first, second)
        backend = in_rounds(facts_of(a, b, job))
        if backend is None:
            return None
        product = lambda a, b: backend.multiply(a, b, job)
        return backend, lambda a, b: self._by_rounds(kind, a, b, product).astype(
            self.dtype_of(kind)
        )

    def _of_round(
        self, kind: Kind, first: ScaledArray, second: ScaledArray, i: jax.typing.ArrayLike
    ) -> tuple[ScaledArray, ScaledArray, jax.Array]:
        """The operands of the i-th tile of every group, with rows to sum over last, and the tiles.

        A group without such a tile gets another one, and beyond the last tile as its number.
        """
        tiles, height, _ = self.shapes[0]
        count = self.padded_sizes // height
        at = jnp.cumsum(count) - count + i
        here = jnp.where(i < count, at, 0)
        a = _at(first if kind != "wgrad" else first.transpose(0, 2, 1), here)
        b = second if kind == "dgrad" else second.transpose(0, 2, 1)
        b = _at(b, here) if kind == "wgrad" else b
        return a, b, jnp.where(i < count, at, tiles)

    def _by_rounds(
        self,
        kind: Kind,
        first: ScaledArray,
        second: ScaledArray,
        product: Callable[[ScaledArray, ScaledArray], jax.Array],
    ) -> jax.Array:
        """Round by round, as many as the group with the most tiles has."""
        (tiles, height, k), (groups, _, n) = self.shapes
        shape = {
            "fprop": (tiles, height, n),
            "dgrad": (tiles, height, k),
            "wgrad": (groups, k, n),
        }[kind]

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            a, b, tile = self._of_round(kind, first, second, i)
            y = product(a, b)
            if kind == "wgrad":
                return total + jnp.where((tile < tiles)[:, None, None], y, 0.0)
            return total.at[tile].set(y, mode="drop")

        zeros = jnp.zeros(shape, jnp.float32 if kind == "wgrad" else self.dtype_of(kind))
        zeros, *_ = same_varying_axes((zeros, first, second, self.padded_sizes))
        return lax.fori_loop(0, jnp.max(self.padded_sizes) // height, add, zeros)

    def _by_tiles(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        """One tile after the other, each an ordinary product; f32."""
        (_, height, k), (groups, _, n) = self.shapes
        group, f32 = self.group, np.dtype(np.float32)
        dot = Dot(((height, k), (k, n)), (f32, f32, f32), (((1,), (0,)), ((), ())), "emulate")
        tiles, others = _Stack(first), _Stack(second)
        product = lambda a, b: dot.multiply(kind, a, b, sums)
        indices = jnp.arange(group.shape[0])
        if kind != "wgrad":
            return lax.map(lambda i: product(tiles[i], others[group[i]]), indices)

        def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return total.at[group[i]].add(product(tiles[i], others[i])), None

        zeros = jnp.zeros((groups, k, n), jnp.float32)
        zeros, *_ = same_varying_axes((zeros, first, second, group))
        return lax.scan(add, zeros, indices)[0]

    def _by_groups(self, kind: Kind, first: Operand, second: Operand) -> jax.Array:
        """JAX's own ragged product, over all tiles of a group at once; f32."""
        in_sum, in_second_sum = {
            "fprop": ((2,), (1,)),
            "dgrad": ((2,), (2,)),
            "wgrad": ((0, 1), (0, 1)),
        }[kind]
        factors: list[jax.Array] = []
        precision = None
        if isinstance(first, ScaledArray) and isinstance(second, ScaledArray):
            if not varies_along(first, in_sum) and not varies_along(second, in_second_sum):
                factors = _factors(kind, first, second, self.group)
                # Every stored value is a bf16 value, so the tensor cores of bf16 are exact.
                first, second = (decode(q.data).astype(jnp.bfloat16) for q in (first, second))
        if isinstance(first, ScaledArray) or isinstance(second, ScaledArray):
            precision = lax.Precision.HIGHEST
        first, second = (
            scaled_values(x) if isinstance(x, ScaledArray) else x for x in (first, second)
        )
        common = jnp.promote_types(first.dtype, second.dtype)
        tiles, height, _ = self.shapes[0]
        flat = lambda x: x.astype(common).reshape(tiles * x.shape[1], x.shape[-1])
        first, second = flat(first), second.astype(common) if kind != "wgrad" else flat(second)
        sums = {"fprop": ([1], [1]), "dgrad": ([1], [2]), "wgrad": ([0], [0])}[kind]
        y = lax.ragged_dot_general(
            first,
            second,
            self.padded_sizes,
            lax.RaggedDotDimensionNumbers((sums, ([], [])), [0], [] if kind == "wgrad" else [0]),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if kind != "wgrad":
            # A ragged product leaves the rows of unneeded tiles undefined.
            needed = jnp.arange(y.shape[0])[:, None] < jnp.sum(self.padded_sizes)
            y = jnp.where(needed, y, 0.0).reshape(tiles, height, y.shape[-1])
        for factor in factors:
            y = y * factor
        return y


_ROWS_IN_BATCHES = (((2,), (2,)), ((0,), (0,)))


def _at(q: ScaledArray, index: jax.Array) -> ScaledArray:
    """The matrices of a stack at `index`; what all of them share stays as it is."""
    take = lambda leaf: leaf[index] if leaf.ndim and leaf.shape[0] > 1 else leaf
    taken = jax.tree.map(take, q)
    return replace(taken, data=q.data[index])


def _factors(
    kind: Kind, first: ScaledArray, second: ScaledArray, group: jax.Array
) -> list[jax.Array]:
    """What to multiply products of the stored values by: scales that do not vary along the sum."""
    first_free, second_free = {"fprop": (1, 2), "dgrad": (1, 1), "wgrad": (2, 2)}[kind]
    of_rows = (to_output(s, first, (0,), (first_free,), 0, 1) for s in scale_as_f32_pair(first))
    of_columns = (
        to_output(s, second, (0,), (second_free,), 1, 0) for s in scale_as_f32_pair(second)
    )
    if kind != "wgrad":
        of_columns = (s[group] if s.ndim and s.shape[0] > 1 else s for s in of_columns)
    return scale_products(tuple(of_rows), tuple(of_columns))


class _Stack:
    """A stack of matrices, `ScaledArray`s or not, from which a loop takes one at a time.

    8-bit data goes into the loop as uint8, because XLA:CPU would widen f8 arrays there.
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
    """The scale of a stack of arrays, which `jax.vmap` gave a leading dimension."""
    if isinstance(scale, ScaledArray):
        return replace(scale, scale=with_all_dims(scale.scale, ndim))
    return scale if scale.ndim == ndim else lax.expand_dims(scale, range(1, ndim))
