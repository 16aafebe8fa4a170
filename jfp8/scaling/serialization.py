"""`ScaledArray`s in Flax's own serialization, which knows arrays and what is registered with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from flax import serialization

from jfp8.scaling.arrays import ScaledArray


def _to_state_dict(q: ScaledArray) -> dict[str, Any]:
    # With the block, a checkpoint can be read without a target that knows it.
    block = {} if q.block is None else {"block": np.asarray(q.block, np.int32)}
    return {"data": q.data, "scale": serialization.to_state_dict(q.scale), **block}


def _from_state_dict(q: ScaledArray, state: Any) -> ScaledArray:
    if not isinstance(state, dict):
        raise ValueError(
            f"The checkpoint has an array of shape {np.shape(state)}, the target a ScaledArray. "
            "Restore into the parameters before they were quantized, then quantize these: "
            "jfp8.quantize_params(flax.serialization.from_state_dict(params, state), recipe)."
        )
    block = tuple(np.asarray(state["block"]).tolist()) if "block" in state else q.block
    if block != q.block:
        raise ValueError(
            f"The checkpoint has a ScaledArray in blocks of {block}, the target one in blocks of "
            f"{q.block}, so that scales would belong to other elements. Restore into a target with "
            "the same recipe and optimizer, and dequantize()."
        )
    scale: Any = serialization.from_state_dict(q.scale, state["scale"], name="scale")
    return replace(q, data=state["data"], scale=scale)


serialization.register_serialization_state(ScaledArray, _to_state_dict, _from_state_dict)
