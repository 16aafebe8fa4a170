"""`GroupedByXla`: grouped matmuls without our kernels, on GPUs with tensor cores for them.

By JAX's own ragged matmul in bf16, which is exact for stored values; or, in a narrow format, a
tile of each group at a time by a backend for batches of matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.backend import Backend, check_not_refused, facts_of
from jfp8.kernels.cuda_backends import backend_in_rounds, known_gpu
from jfp8.kernels.on_platform import on_cuda
from jfp8.kernels.xla import f8_dot
from jfp8.matmul.known_scales import varies_along
from jfp8.matmul.spec import MatmulSpec, scale_products, to_output
from jfp8.products.operation import Kind, Operand
from jfp8.products.ragged.by_tiles import GroupedDot, grouped_operation
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair, scaled_values
from jfp8.scaling.codes import decode
from jfp8.tracing.backends import first_allowed
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.notes import note


@grouped_operation
@dataclass(frozen=True)
class GroupedByXla(GroupedDot):
    """Compute the result of `GroupedDot`."""

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        dtype = self.dtype_of(kind)
        by_tiles = lambda self, a, b: self.by_tiles(kind, a, b, spec).astype(dtype)
        by_groups = lambda self, a, b: self._by_groups(kind, a, b).astype(dtype)
        if spec.implementation is not None:
            check_not_refused(spec.implementation, f8_dot.BACKEND.why_not_sums(spec.accumulation))
            with note("cuda", "bf16: JAX's own ragged matmul"):
                return by_groups(self, first, second)
        rounds = self._rounds(kind, first, second, spec)
        if rounds is not None:
            backend, function = rounds
            why = f"{backend.name}: a tile of each group at a time"
            return on_cuda(function, by_tiles, self, first, second, why=why)
        name = first_allowed("this grouped matmul", "bf16", "emulate")
        if spec.accumulation != "f32" or name == "emulate":
            return by_tiles(self, first, second)
        why = "bf16: no FP8 kernel for these groups on this GPU"
        return on_cuda(by_groups, by_tiles, self, first, second, why=why)

    def _rounds(
        self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec
    ) -> tuple[Backend, Callable[..., jax.Array]] | None:
        """Return a backend that multiplies a tile of each group at once, with `by_rounds`."""
        if not isinstance(first, ScaledArray) or not isinstance(second, ScaledArray):
            return None
        # Sums over tiles are in f32; other matmuls are written once.
        dtype = np.dtype(np.float32) if kind == "wgrad" else self.dtype_of(kind)
        spec = replace(spec, dimension_numbers=(((2,), (2,)), ((0,), (0,))), dtype=dtype)
        a, b = jax.eval_shape(lambda a, b: self._of_round(kind, a, b, 0)[:2], first, second)
        backend = backend_in_rounds(facts_of(a, b, spec), known_gpu(spec.device))
        if backend is None:
            return None
        product = lambda a, b: backend.multiply(a, b, spec)
        return backend, lambda self, a, b: self._by_rounds(kind, a, b, product)

    def _of_round(
        self, kind: Kind, first: ScaledArray, second: ScaledArray, i: jax.typing.ArrayLike
    ) -> tuple[ScaledArray, ScaledArray, jax.Array]:
        """Return the operands of the i-th tile of every group, with rows to sum last, and tiles.

        A group without such a tile gets another one, and a number past the last tile.
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
        """Multiply in rounds, as many as the group with the most tiles has."""
        (tiles, height, k), (groups, _, n) = self.shapes
        shape = (groups, k, n) if kind == "wgrad" else (tiles, height, n if kind == "fprop" else k)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            a, b, tile = self._of_round(kind, first, second, i)
            y = product(a, b)
            if kind == "wgrad":
                return total + jnp.where((tile < tiles)[:, None, None], y, 0.0)
            return total.at[tile].set(y, mode="drop")

        zeros = jnp.zeros(shape, jnp.float32 if kind == "wgrad" else self.dtype_of(kind))
        zeros, *_ = same_varying_axes((zeros, first, second, self.padded_sizes))
        total = lax.fori_loop(0, jnp.max(self.padded_sizes) // height, add, zeros)
        return total.astype(self.dtype_of(kind))

    def _by_groups(self, kind: Kind, first: Operand, second: Operand) -> jax.Array:
        """Compute JAX's own ragged matmul, over all tiles of a group at once; f32."""
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
                # Every f8 value is a bf16 value, so the tensor cores of bf16 are exact.
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
            # A ragged matmul leaves the rows of unneeded tiles undefined.
            needed = jnp.arange(y.shape[0])[:, None] < jnp.sum(self.padded_sizes)
            y = jnp.where(needed, y, 0.0).reshape(tiles, height, y.shape[-1])
        for factor in factors:
            y = y * factor
        return y


def _at(q: ScaledArray, index: jax.Array) -> ScaledArray:
    """Return the matrices of a stack at `index`; values that all share are unchanged."""
    take = lambda leaf: leaf[index] if leaf.ndim and leaf.shape[0] > 1 else leaf
    taken = jax.tree.map(take, q)
    return replace(taken, data=q.data[index])


def _factors(
    kind: Kind, first: ScaledArray, second: ScaledArray, group: jax.Array
) -> list[jax.Array]:
    """Return factors of the matmuls of stored values: scales constant along the contraction."""
    first_free, second_free = {"fprop": (1, 2), "dgrad": (1, 1), "wgrad": (2, 2)}[kind]
    of_rows = (to_output(s, first, (0,), (first_free,), 0, 1) for s in scale_as_f32_pair(first))
    of_columns = (
        to_output(s, second, (0,), (second_free,), 1, 0) for s in scale_as_f32_pair(second)
    )
    if kind != "wgrad":
        of_columns = (s[group] if s.ndim and s.shape[0] > 1 else s for s in of_columns)
    return scale_products(tuple(of_rows), tuple(of_columns))
