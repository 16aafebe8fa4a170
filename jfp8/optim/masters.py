"""Training parameters in 8 or 16 bits: a working copy, and a master that keeps its lower bits.

A step changes a weight by less than the spacing of a narrow format. Rounded to nearest, the change
is lost; it has to be kept in a wider master, or rounded stochastically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jfp8.optim.fp8_params import update_by_lot, update_to
from jfp8.optim.storage import Float, ScaledFloat16, Storage, round_to_16_bits
from jfp8.optim.stored_state import outside_variables
from jfp8.optim.wrapping import MasterWeightsState, seed_words, states_of, transformation, widened
from jfp8.scaling import printing
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.random_bits import fold_in, hash_bits
from jfp8.scaling.trees import is_scaled_array

Master = Literal[None, "bfloat16", "float16_scaled", "float32"]

_STORAGES: dict[str | None, Storage | None] = {
    None: None,
    "bfloat16": Float(jnp.bfloat16, stochastic=True),
    "float16_scaled": ScaledFloat16(),
    "float32": Float(),
}


def master_weights(
    inner: optax.GradientTransformation, master: Master = None, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Train parameters that are stored in FP8 or 16 bits, with or without a wider master. ::

        m <- round(m + u),   u = inner(gradient, m)      m: the master, or the parameter itself
        p <- round(m)                                    p: what is in params

        parameter in params     master=None             "bfloat16"   "float16_scaled"   "float32"
        FP8, `ScaledArray`      1 byte, stochastic      1 + 2        1 + 2              1 + 4
        bf16 or f16 array       2 bytes, stochastic     the same     2 + 2              2 + 4
        f32 array               4 bytes, its own master

    The bfloat16 master is rounded stochastically, too; the others to nearest: with a float32 master
    nothing is lost, while "float16_scaled", MS-AMP's, loses steps of less than 2^-12 of the weight.

    `inner` sees the masters, and keeps its state, in f32. FP8 parameters are `ScaledArray` with f32
    scales, such as `jfp8.quantize_params` makes. Their scales change by powers of two, so that
    codes that a step does not change stay the same.

    `jfp8.TrainState` trains such parameters. In your own loop, differentiate with respect to
    `carriers`, and add the updates with `apply_updates`. Nothing may change the updates after this:
    put it last in a chain, or directly inside `jfp8.skip_on_overflow`. Transformations that read
    parameters (weight decay) belong in `inner`.

    Masters start from the values of the parameters. Call `init_masters` to start them from the
    parameters before rounding.

    Args:
      inner: the optimizer, such as ``optax.adamw(1e-3)``.
      master: the master that is kept for parameters that are narrower than it.
      seed: seed of the random bits, which also depend on the step, the leaf and the element.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `MasterWeightsState`. The updates are
      `StoredUpdate` for FP8 parameters and f32 for others, exact under ``optax.apply_updates``,
      like those of `stochastic_rounding`.

    Raises:
      TypeError: `inner` is not a transformation, or `seed` not an int; a `ScaledArray` whose scales
        are not f32.
      ValueError: unknown `master`; ``update`` is called without ``params``, or for 16-bit
        parameters with a state that was made for f32 parameters.

    References:
      MS-AMP (O3: E4M3 weights, FP16 master with a scale); Intel FP8 Emulation Toolkit
      ("stochastic 16-bit master weights").

    >>> import jax.numpy as jnp, jfp8, optax
    >>> tx = jfp8.optim.master_weights(optax.sgd(0.25), "bfloat16")
    >>> params = {"w": jfp8.quantize(jnp.array([1.0, 2.0, 448.0]))}
    >>> updates, state = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    >>> jfp8.optim.apply_updates(params, updates)["w"].dequantize().tolist()
    [0.75, 1.75, 448.0]
    """
    if master not in _STORAGES:
        allowed = ", ".join(map(repr, _STORAGES))
        raise ValueError(f"master_weights(master={master!r}) is unknown. Allowed: {allowed}.")
    tx = Rounded("master_weights", transformation("master_weights", inner), _STORAGES[master], seed)
    return optax.GradientTransformationExtraArgs(tx.init, cast(Any, tx.update))


@dataclass(frozen=True)
class Rounded:
    """A transformation in f32, with the parameters that result rounded to their formats."""

    function: str  # name of the public one, for errors
    inner: optax.GradientTransformationExtraArgs
    storage: Storage | None  # masters' storage; None without masters
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"{self.function}(seed={self.seed!r}): must be an int.")

    def init(self, params: optax.Params) -> MasterWeightsState:
        leaves, structure = _flatten(params)
        wide = [_values(p) for p in leaves]
        masters = [_first(_beside(p, self.storage), x) for p, x in zip(leaves, wide, strict=True)]
        inner_state = self.inner.init(structure.unflatten(wide))
        masters = outside_variables(structure.unflatten(masters))
        return MasterWeightsState(jnp.zeros((), jnp.uint32), masters, inner_state)

    def update(
        self,
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError(
                f"{self.function} needs the parameters that it updates: call tx.update(grads, "
                "state, params)."
            )
        leaves, structure = _flatten(params)
        if any(map(is_scaled_array, structure.flatten_up_to(updates))):
            raise TypeError(
                f"{self.function} got gradients of codes and scales, which say nothing of the "
                "values of FP8 parameters. Take gradients by jfp8.value_and_grad, or "
                "jfp8.nnx.value_and_grad, and update by jfp8.nnx.Optimizer."
            )
        kept = [_beside(p, self.storage) for p in leaves]
        masters = structure.flatten_up_to(state.masters)
        wide = [_wide(*leaf) for leaf in zip(leaves, kept, masters, strict=True)]
        updates, inner_state = self.inner.update(
            widened(updates), state.inner_state, structure.unflatten(wide), **extra_args
        )
        changes = structure.flatten_up_to(updates)
        step_seed = fold_in(seed_words(self.seed), state.count)
        for i, (p, beside, u) in enumerate(zip(leaves, kept, changes, strict=True)):
            if not hasattr(u, "dtype"):  # a placeholder of optax.masked
                continue
            leaf_seed = fold_in(step_seed, np.uint32(i))
            if beside is None:
                changes[i] = _by_lot(p, u, leaf_seed)
            else:
                masters[i] = beside.encode(wide[i] + u.astype(jnp.float32), leaf_seed)
                changes[i] = _to_nearest(p, beside.decode(masters[i]))
        new_state = MasterWeightsState(
            state.count + np.uint32(1), structure.unflatten(masters), inner_state
        )
        return structure.unflatten(changes), new_state


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      count: u32[], number of updates; with the seed it determines the random bits.
      inner_state: state of the wrapped transformation.
    """

    count: jax.Array
    inner_state: Any

    __repr__ = printing.named_state


def stochastic_rounding(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Update bf16 and f16 parameters by ``p <- round_stochastically(p + u)``, others plainly.

    The 16-bit parameters are their own master weights. `inner` sees them, and keeps its state, in
    f32. The updates come out in f32, as ``round(p + u) - p``, so that ``optax.apply_updates`` gives
    exactly the rounded value (unless a step shrinks a parameter more than 2^14-fold). Nothing may
    change the updates after this: put it last in a chain, or directly inside
    `jfp8.loss_scale` or `jfp8.skip_on_overflow`.

    Args:
      inner: the optimizer, such as ``optax.adamw(1e-3)``.
      seed: seed of the random bits, which also depend on the step, the leaf and the element.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StochasticRoundingState`.

    Raises:
      TypeError: `inner` is not a transformation, or `seed` not an int.
      ValueError: ``update`` is called without ``params``.

    References:
      Intel FP8 Emulation Toolkit ("stochastic 16-bit master weights"); torchao,
      ``bf16_stochastic_round``.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> tx = jfp8.loss_scale(jfp8.optim.stochastic_rounding(optax.adam(1e-3)))
    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> grads = {"w": jfp8.scale_loss(1.0, state) * jnp.ones(3)}
    >>> updates, state = tx.update(grads, state, params)
    >>> optax.apply_updates(params, updates)["w"].dtype
    dtype(bfloat16)
    """
    wrapped = transformation("stochastic_rounding", inner)
    tx = Rounded("stochastic_rounding", wrapped, None, seed)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        state = tx.init(params)
        return StochasticRoundingState(state.count, state.inner_state)

    def update_fn(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        none = jax.tree.map(lambda p: optax.MaskedNode(), params, is_leaf=is_scaled_array)
        full = MasterWeightsState(state.count, none, state.inner_state)
        updates, full = tx.update(updates, full, params, **extra_args)
        return updates, StochasticRoundingState(full.count, full.inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, cast(Any, update_fn))


def init_masters(opt_state: optax.OptState, params: optax.Params) -> optax.OptState:
    """Set the masters in `opt_state` to `params` in high precision, before rounding. ::

        working = jfp8.quantize_params(params)
        opt_state = init_masters(tx.init(working), params)

    For a `jfp8.TrainState`: ``state.replace(opt_state=init_masters(state.opt_state, params))``.

    Args:
      opt_state: state of an optimizer with one `master_weights` in it.
      params: the parameters in f32, with the structure of those that the state was made for.

    Returns:
      The same state with new masters. Parameters that are their own masters are not in it: with
      ``master=None`` nothing changes.

    Raises:
      ValueError: there is no `master_weights` in it, or more than one; another structure.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> params = {"w": jnp.array([0.3, 1.0])}
    >>> tx = jfp8.optim.master_weights(optax.sgd(0.1), "float32")
    >>> working = {"w": jfp8.quantize(params["w"])}
    >>> jfp8.optim.init_masters(tx.init(working), params).masters["w"]
    Array([0.3, 1. ], dtype=float32)
    """
    found = states_of(MasterWeightsState, opt_state)
    if len(found) != 1:
        raise ValueError(
            f"opt_state holds {len(found)} master_weights; init_masters needs exactly one: "
            "tx = jfp8.optim.master_weights(optax.adamw(1e-3), 'bfloat16')."
        )

    def start(value: Any, stored: Any) -> Any:
        if isinstance(stored, optax.MaskedNode):
            return stored
        plain = isinstance(stored, jax.Array | np.ndarray)
        return _first(Float(stored.dtype) if plain else ScaledFloat16(), _values(value))

    leaves, structure = _flatten(params)
    started = map(start, leaves, structure.flatten_up_to(found[0].masters))
    new = found[0]._replace(masters=structure.unflatten(started))
    is_state = lambda node: isinstance(node, MasterWeightsState)
    return jax.tree.map(lambda node: new if is_state(node) else node, opt_state, is_leaf=is_state)


def _flatten(params: Any) -> tuple[list[Any], jax.tree_util.PyTreeDef]:
    return jax.tree.flatten(params, is_leaf=is_scaled_array)


def _beside(p: Any, storage: Storage | None) -> Storage | None:
    """Return the storage of the master of `p`; None if `p` is its own master."""
    if isinstance(p, ScaledArray):
        return storage
    has_16_bits = jnp.result_type(p) in (jnp.bfloat16, jnp.float16)
    # A bf16 master of a bf16 parameter would be that parameter.
    return storage if has_16_bits and storage != _STORAGES["bfloat16"] else None


def _first(storage: Storage | None, value: jax.Array) -> Any:
    """Round the first master to nearest: there are no steps yet whose bias could add up."""
    if storage is None:
        return optax.MaskedNode()
    nearest = Float(storage.dtype) if isinstance(storage, Float) else storage
    return nearest.encode(value, jnp.zeros((2,), jnp.uint32))


def _values(p: Any) -> Any:
    if not isinstance(p, ScaledArray):
        return widened(p)
    if isinstance(p.scale, ScaledArray) or p.scale.dtype != jnp.float32:
        kind = "two-level" if isinstance(p.scale, ScaledArray) else p.scale.dtype
        raise TypeError(
            f"master_weights trains FP8 parameters with float32 scales, but one of shape {p.shape} "
            f"has {kind} scales. Quantize it with another recipe: jfp8.quantize_params(params, "
            "jfp8.recipes.DelayedScaling())."
        )
    return scaled_values(p)


def _wide(p: Any, beside: Storage | None, stored: Any) -> Any:
    if (beside is None) != isinstance(stored, optax.MaskedNode):
        raise ValueError(
            f"master_weights: the state was made for another parameter, not for this {p.dtype} "
            f"array of shape {p.shape}. Call tx.init with the parameters as they are stored. "
            "(jfp8.loss_scale(inner) widens 16-bit parameters first; put it in front instead: "
            "jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(), master_weights(...))).)"
        )
    return _values(p) if beside is None else beside.decode(stored)


def _by_lot(p: Any, u: jax.Array, seed: jax.Array) -> Any:
    """Return the update to ``p + u`` rounded stochastically; for f32, `u` itself."""
    if isinstance(p, ScaledArray):
        return update_by_lot(p, u, seed)
    dtype = jnp.result_type(p)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return u
    wide = p.astype(jnp.float32)
    new = round_to_16_bits(wide + u.astype(jnp.float32), dtype, hash_bits(seed, p.shape))
    return new - wide


def _to_nearest(p: Any, value: jax.Array) -> Any:
    """Return the update that takes `p` to `value` rounded to nearest."""
    if isinstance(p, ScaledArray):
        return update_to(p, value)
    if p.dtype == jnp.bfloat16:  # XLA might remove a pair of casts
        rounded = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
    else:  # float16's would flush subnormals
        rounded = value.astype(p.dtype).astype(jnp.float32)
    return rounded - p.astype(jnp.float32)
