"""Helpers of the tests of checkpoints."""

import functools
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jfp8
from jfp8.checkpoint import CheckpointChange
from support.arrays import spread

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
}
SUFFIXES = ("_packed", "_blocks", "")


def told(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Return the result of `function`, and its messages, which name the file that called it."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = function(*args, **kwargs)
    assert all(issubclass(w.category, CheckpointChange) for w in caught), [str(w) for w in caught]
    assert {w.filename for w in caught} <= {__file__}
    return result, [str(w.message) for w in caught]


@functools.partial(jax.jit, static_argnums=0)
def quantized(recipe: Any, w: jax.typing.ArrayLike) -> jfp8.ScaledArray:
    """Quantize a matrix ``[out, in]`` as `recipe` does in the forward product."""
    return jfp8.quantize_params({"kernel": w.T}, recipe)["kernel"].T


@jax.jit
def dequantized(q: jfp8.ScaledArray) -> jax.Array:
    """Return the values of `q`, by one program instead of one for each operation."""
    return q.dequantize()


def raw(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a folder, read by a few lines of this file."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, entry in header.items():
            begin, end = (start + n for n in entry["data_offsets"])
            array = np.frombuffer(content[begin:end], DTYPES[entry["dtype"]])
            found[name] = array.reshape(entry["shape"])
    return found


def published(stored: dict[str, np.ndarray], weight: str, block: Any = None) -> np.ndarray:
    """Return the f32 values of a weight by its library's rules; cut blocks need their size."""
    data = next(stored[weight + s] for s in SUFFIXES if weight + s in stored)
    names = [weight + s for s in ("_scales", "_scale_inv", "_scale")]
    scale = next(stored[n] for n in [*names, weight.replace("weight", "scale")] if n in stored)
    data = data.view(np.uint8) if data.dtype == np.int8 else data
    if data.dtype == np.uint8:
        data = np.stack([E2M1[data & 15], E2M1[data >> 4]], -1)
        if weight + "_scale_2" in stored:
            data += 0  # modelopt's -0 is 0
        data = data.reshape(*scale.shape[:-1], -1)
    data = data.astype(np.float32)
    if scale.dtype == np.uint8:
        scale = np.where(scale == 255, np.nan, np.exp2(scale.astype(np.float64) - 127))
    scale = scale.astype(np.float32)
    if weight + "_global_scale" in stored:  # compressed-tensors divides by it
        scale = scale / stored[weight + "_global_scale"]
    if weight + "_scale_2" in stored:  # modelopt multiplies by it
        scale = scale * stored[weight + "_scale_2"]
    if scale.size > 1:
        scale = spread(
            scale.reshape(*scale.shape, *(1,) * (data.ndim - scale.ndim)), data.shape, block
        )
    return data * scale


def in_two_processes(program: str, directory: Path, devices: int) -> None:
    """Run a test file in two processes: with `directory`, the address of both, and a number."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = [str(Path(jfp8.__file__).parents[1]), str(Path(__file__).parents[1])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-W", "ignore", program, str(directory), address]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=pipe, stderr=pipe, text=True)
        for i in range(2)
    ]
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert "all is there" in out, error[-3000:]
