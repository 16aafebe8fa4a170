"""Print gradients and training states by their sizes; leaves may be shapes or placeholders."""

from __future__ import annotations

import math
from typing import Any

import jax

from jfp8.optim.loss_scale_state import LossScaleState
from jfp8.optim.wrapping import states_of
from jfp8.scaling import printing
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.trees import is_scaled_array


def printed_gradients(grads: Any) -> str:
    """Return the printed form of `Gradients`."""
    parts = [f"params=({printing.tree(grads.params)})"]
    if grads.fp8_sink:
        parts.append(f"fp8_sink=({printing.tree(grads.fp8_sink)})")
    if grads.collections:
        parts.append(f"collections=({_spelled_collections(grads.collections)})")
    return f"Gradients({', '.join(parts)})"


def printed_state(state: Any) -> str:
    """Return the printed form of `TrainState`."""
    parts = [f"step={printing.number(state.step)}"]
    skipped = printing.number(state.skipped_steps)
    if skipped.isdigit() and skipped != "0":
        in_a_row = f"the last {printing.number(state.skipped_in_a_row)} in a row"
        parts.append(f"skipped_steps={skipped} ({in_a_row})")
    parts.append(f"params=({_spelled_params(state.params)})")
    if state.fp8:
        begun = printing.number(state.step) != "0"
        empty = ", all empty: scales are current" if begun and _are_empty(state.fp8) else ""
        parts.append(f"fp8=({_spelled_products(state.fp8)}{empty})")
    parts.append(f"opt_state=({_spelled_optimizer(state.opt_state)})")
    if state.collections:
        parts.append(f"collections=({_spelled_collections(state.collections)})")
    lines = "".join(f"\n  {part}," for part in parts)
    return f"{type(state).__name__}({lines}\n)"


def _spelled_params(params: Any) -> str:
    leaves = jax.tree.leaves(params, is_leaf=is_scaled_array)
    n_fp8 = sum(map(is_scaled_array, leaves))
    arrays = [x.data if isinstance(x, ScaledArray) else x for x in leaves]
    n = sum(math.prod(x.shape) for x in arrays if printing.is_arraylike(x))
    stored = f", {printing.counted(n_fp8, 'array')} in FP8" if n_fp8 else ""
    return f"{printing.counted(n, 'parameter')} in {printing.tree(params)}{stored}"


def _spelled_products(fp8: Any) -> str:
    """Count the matmuls of an ``fp8`` collection; stacked layers count separately."""
    histories = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(fp8)
        if [getattr(k, "key", None) for k in path[-2:]] == ["grad", "amax_history"]
        and printing.is_arraylike(x)
    ]
    if not histories:
        return printing.tree(fp8)
    lengths = sorted({x.shape[-1] for x in histories})
    products = printing.counted(sum(math.prod(x.shape[:-1]) for x in histories), "product")
    return f"{products} with amax histories of {' or '.join(map(str, lengths))} steps"


def _are_empty(fp8: Any) -> bool:
    """Return True if no history has an entry; False if the arrays have no values."""
    leaves = [printing.on_host(leaf) for leaf in jax.tree.leaves(fp8)]
    return all(leaf is not None and not leaf.any() for leaf in leaves)


def _spelled_optimizer(opt_state: Any) -> str:
    scales = states_of(LossScaleState, opt_state)
    numbers = [(printing.number(s.loss_scale), printing.number(s.mark.least)) for s in scales]
    spelled = [f"loss scale {n}" + ", its least value" * (n == least) for n, least in numbers]
    return "; ".join([printing.optimizer_state(opt_state), *spelled])


def _spelled_collections(collections: Any) -> str:
    of_bits = getattr(collections, "numbers", None)
    if of_bits is not None and not printing.is_arraylike(collections.units):  # placeholders
        collections = of_bits
    return "; ".join(f"{name}: {printing.tree(value)}" for name, value in collections.items())
