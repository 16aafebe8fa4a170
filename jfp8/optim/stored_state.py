"""Optimizer states stored in few bits: a wrapper around any optax transformation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from jfp8.optim.block_storage import ExpandedArray
from jfp8.optim.storage import HalfArray, Storage
from jfp8.optim.wrapping import seed_words, transformation, widened
from jfp8.scaling import printing
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.random_bits import fold_in
from jfp8.tracing.few_kernels import in_few_kernels


class StoredState(NamedTuple):
    """State of `store_state`.

    Attributes:
      count: u32[], number of updates; with the seed it determines the random bits.
      inner_state: state of the wrapped transformation, with stored forms in place of some arrays.
    """

    count: jax.Array
    inner_state: Any

    __repr__ = printing.named_state


def store_state(
    inner: optax.GradientTransformation,
    storages: Mapping[str, Storage],
    *,
    min_size: int = 4096,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Store parts of the state of `inner` in fewer bits than f32. ::

        wide = decode(state);   updates, wide = inner.update(g, wide, p);   state = encode(wide)

    `inner` computes in f32, from f32 gradients and parameters, so that updates are computed from
    its state before rounding. Under ``jit`` no f32 copy of the state remains.

    Args:
      inner: transformation whose state has fields (of named tuples or dataclasses, at any depth)
        with one leaf per parameter, such as ``optax.adamw(1e-3)`` or a chain with it.
      storages: how to store the fields of these names; for example
        ``{"mu": Blocks(block=256), "nu": ScaledFloat16()}`` for Adam, ``{"trace": Blocks()}`` for
        ``optax.sgd`` with momentum. Rounded to nearest, an element that a step changes by less than
        half a spacing does not move: see ``rounding`` of `Blocks`.
      min_size: arrays with fewer elements are not changed, nor are those of fewer than two
        dimensions: they take little memory, and biases and norms are sensitive. ``init`` compares
        the arrays that it gets (in ``jax.shard_map`` a shard), ``update`` asks the state.
      seed: int or i32[], for stochastic rounding, whose bits also depend on the step, the leaf and
        the element.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StoredState`.

    Raises:
      TypeError: `inner` is not a transformation, or one of `storages` is not a `Storage`.
      ValueError: ``init`` finds no field with one of the names.

    >>> import jax.numpy as jnp, optax
    >>> from jfp8.optim import Blocks, store_state
    >>> tx = store_state(optax.lion(1e-4), {"mu": Blocks()})
    >>> tx.init({"w": jnp.ones((64, 256))}).inner_state[0].mu["w"].data.dtype
    dtype(float8_e4m3fn)
    >>> tx = store_state(optax.lion(1e-4), {"mu": Blocks()}, min_size=2**15)
    >>> tx.init({"w": jnp.ones((64, 256))}).inner_state[0].mu["w"].dtype
    dtype('float32')
    """
    for name, storage in storages.items():
        if not isinstance(storage, Storage):
            raise TypeError(
                f"store_state(storages={{{name!r}: {storage!r}}}): must be a Storage such as "
                "Blocks(), ScaledFloat16() or Float(jnp.bfloat16)."
            )
    wrapper = _Wrapper(transformation("store_state", inner), storages, min_size, seed)
    return optax.GradientTransformationExtraArgs(wrapper.init, cast(Any, wrapper.update))


@dataclasses.dataclass(frozen=True)
class _Wrapper:
    inner: optax.GradientTransformationExtraArgs
    storages: Mapping[str, Storage]
    min_size: int
    seed: jax.typing.ArrayLike

    def init(self, params: optax.Params) -> StoredState:
        # Each behind a barrier, or XLA would compute the scales of zeros while it compiles.
        opaque = lambda x: lax.optimization_barrier(x) if isinstance(x, jax.Array) else x
        wide = jax.tree.map(opaque, self.inner.init(widened(params)))
        fields = _field_names(wide)
        if missing := sorted(set(self.storages) - fields):
            raise ValueError(
                f"store_state(storages=...) names {missing}, but the state of inner has no such "
                f"field. It has {sorted(fields)}; those with one leaf per parameter can be stored."
            )
        large = lambda _, leaf: math.prod(leaf.shape) >= self.min_size
        storages, count = self._storages_of(wide, large), jnp.zeros((), jnp.uint32)
        stored = self._round(wide, _measure(wide, storages), storages, count)
        return StoredState(count, outside_variables(stored))

    def update(
        self,
        updates: optax.Updates,
        state: StoredState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StoredState]:
        # The state decides, not sizes, since a shard is smaller than its array.
        storages = self._storages_of(state.inner_state, lambda storage, leaf: storage.holds(leaf))
        leaves = jax.tree.leaves(state.inner_state, is_leaf=is_stored)
        pairs = zip(storages, leaves, strict=True)
        tables = in_few_kernels([s.tables(leaf) if s else () for s, leaf in pairs])

        def step(updates: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            wide = _decode(inner_state, storages, tables)
            return self.inner.update(widened(updates), wide, widened(params), **extra_args)

        # Rounding needs the scale of a block before its first element, so the state is computed
        # again for each thing that is measured, and once more to be rounded. Computed once, XLA
        # would write it out in f32 and read it back. Barriers prevent it from noticing that they
        # are equal.
        inputs = (updates, state.inner_state, params)
        passes = [_measure(step(*inputs)[1], storages)]
        for _ in range(1, max(map(len, passes[0]), default=0)):
            inputs = _opaque(inputs)
            passes.append(_measure(step(*inputs)[1], storages))
        measured = [
            tuple(p[i][j] for j, p in enumerate(passes[: len(m)])) for i, m in enumerate(passes[0])
        ]
        updates, wide = step(*_opaque(inputs))
        count = state.count + np.uint32(1)
        return updates, StoredState(count, self._round(wide, measured, storages, count))

    def _storages_of(
        self, state: Any, applies: Callable[[Storage, Any], bool]
    ) -> list[Storage | None]:
        """Return for each leaf the storage of its field that `applies` to it."""

        def storage_of(path: jax.tree_util.KeyPath, leaf: Any) -> Storage | None:
            if len(getattr(leaf, "shape", ())) < 2:  # optax also passes placeholders
                return None
            names = (getattr(key, "name", None) for key in path)
            found = next((self.storages[name] for name in names if name in self.storages), None)
            return found if found is not None and applies(found, leaf) else None

        leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stored)
        return [storage_of(*each) for each in leaves]

    def _round(
        self,
        wide: Any,
        measured: list[tuple[jax.Array, ...]],
        storages: Sequence[Storage | None],
        count: jax.Array,
    ) -> Any:
        seed_of_step = fold_in(seed_words(self.seed), count)
        leaves, structure = jax.tree.flatten(wide)
        seeds = [tuple(fold_in(seed_of_step, np.uint32(i))) for i in range(len(leaves))]
        seeds = in_few_kernels(seeds)
        for i, (storage, leaf) in enumerate(zip(storages, leaves, strict=True)):
            if storage:
                # Behind a barrier each, so that few arrays wait for the gradients of others.
                scales = in_few_kernels(storage.scales(measured[i]))
                stored = storage.round(leaf, scales, jnp.stack(seeds[i]))
                (data, *stored_scales), form = jax.tree.flatten(stored)
                leaves[i] = form.unflatten([data, *in_few_kernels(stored_scales)])
        return structure.unflatten(leaves)


def _measure(wide: Any, storages: Sequence[Storage | None]) -> list[tuple[jax.Array, ...]]:
    found = zip(storages, jax.tree.leaves(wide), strict=True)
    return [storage.measure(leaf) if storage else () for storage, leaf in found]


def _decode(state: Any, storages: Sequence[Storage | None], tables: Sequence[Any]) -> Any:
    leaves, structure = jax.tree.flatten(state, is_leaf=is_stored)
    found = zip(storages, leaves, tables, strict=True)
    return structure.unflatten([s.decode(leaf, *t) if s else leaf for s, leaf, t in found])


def is_stored(node: Any) -> bool:
    """Return True if `node` of a state is the stored form of one array."""
    return isinstance(node, ScaledArray | HalfArray | ExpandedArray)


def _opaque(tree: Any) -> Any:
    """Put arrays behind barriers; of a stored form its data, so that passes share its scales."""

    def hide(node: Any) -> Any:
        (data, *scales), form = jax.tree.flatten(node)
        return form.unflatten([lax.optimization_barrier(data), *scales])

    return jax.tree.map(hide, tree, is_leaf=is_stored)


def outside_variables(state: Any) -> Any:
    """Take stored forms out of NNX Variables, so that ``nnx.Optimizer`` makes one of each array.

    It updates Variables by the paths of arrays, and would replace a stored form by one of its own.
    """

    def unwrap(node: Any) -> Any:
        is_variable = isinstance(node, nnx.Variable) and is_stored(node.get_value())
        return node.get_value() if is_variable else node

    return jax.tree.map(unwrap, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _field_names(tree: Any) -> set[str]:
    """List the fields of all named tuples and dataclasses in `tree`, empty ones included."""
    names: set[str] = set()

    def look(node: Any) -> bool:
        if isinstance(node, tuple):
            names.update(getattr(node, "_fields", ()))
        elif dataclasses.is_dataclass(node):
            names.update(field.name for field in dataclasses.fields(node))
        return False

    jax.tree.leaves(tree, is_leaf=look)
    return names
