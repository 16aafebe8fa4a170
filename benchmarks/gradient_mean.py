"""Accuracy and bytes of the mean of gradients over 8 virtual devices; print JSON.

It takes four kinds of gradients, each of `size` elements on every device, and averages them in each
way. dB are ``20 log10(|mean| / |error|)`` against float64; bytes are what a device sends in the
compiled program, with all iterations of loops. XLA:CPU sends bf16 as f32; the figures are the bytes
that a GPU would send.

    python benchmarks/gradient_mean.py --size 65536 --output benchmarks/results/gradient_mean.json
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import environment
from jax import lax
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import collectives

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from compiled.sent import collective_bytes

DEVICES = 8


def gradients(size: int) -> dict[str, np.ndarray]:
    """Return f32[DEVICES, size]; devices agree on all but the first, up to half-sized noise."""
    rng = np.random.default_rng(0)
    magnitude = (10 ** rng.uniform(-4, 0, size // 128)).repeat(128)

    def with_noise(shared: np.ndarray) -> np.ndarray:
        return shared * (1 + 0.5 * rng.normal(size=(DEVICES, size)))

    kinds = {
        "normal, independent": rng.normal(size=(DEVICES, size)),
        "normal, blocks over 4 decades": with_noise(rng.normal(size=size) * magnitude),
        "Student t, 2 degrees of freedom": with_noise(rng.standard_t(2, size=size)),
        "log-normal, sigma 2": with_noise(
            rng.normal(size=size) * np.exp(2 * rng.normal(size=size))
        ),
    }
    return {name: x.astype(np.float32) for name, x in kinds.items()}


def means() -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Return functions that average f32[size] over the devices."""

    def in_bf16(x: jax.Array) -> jax.Array:
        return lax.pmean(x.astype(jnp.bfloat16), "data").astype(jnp.float32)

    default = functools.partial(collectives.pmean, axis_name="data", min_size=0)
    in_fp8 = functools.partial(default, fmt=jfp8.E4M3FN)
    stochastic = {"rounding": "stochastic", "key": jax.random.key(0)}
    return {
        "f32": lambda x: lax.pmean(x, "data"),
        "bf16": in_bf16,
        "E5M2, block 128": functools.partial(in_fp8, fmt=jfp8.E5M2),
        "E3M4, block 128": functools.partial(in_fp8, fmt=jfp8.E3M4),
        "E2M5, block 128": functools.partial(in_fp8, fmt=collectives.E2M5),
        "E4M3, block 128": in_fp8,
        "E4M3, block 32": functools.partial(in_fp8, block=32),
        "E4M3, block 8192": functools.partial(in_fp8, block=8192),
        "E4M3, block 128, stochastic": functools.partial(in_fp8, **stochastic),
        "E4M3 or E2M5, block 128 (default)": default,
        "E4M3 or E2M5, block 128, stochastic": functools.partial(default, **stochastic),
    }


def measure(size: int) -> dict[str, dict[str, object]]:
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = gradients(size)
    in_f32 = 2 * (DEVICES - 1) / DEVICES * size * 4
    results: dict[str, dict[str, object]] = {}
    for name, mean in means().items():
        run = jax.jit(
            jax.shard_map(
                lambda x, mean=mean: mean(x[0])[None],
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P("data"),
                check_vma=False,
            )
        )
        compiled = run.lower(jnp.zeros((DEVICES, size))).compile()
        sent = collective_bytes(compiled).total * (0.5 if name == "bf16" else 1)
        row: dict[str, object] = {"bytes": round(sent), "of f32": round(sent / in_f32, 4)}
        for kind, x in data.items():
            exact, result = x.astype(np.float64).mean(0), np.asarray(compiled(x), np.float64)
            error = np.linalg.norm(exact - result[0])
            row[kind] = round(float(20 * np.log10(np.linalg.norm(exact) / error)), 1)
            assert (result == result[:1]).all(), "devices disagree"
        results[name] = row
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=65536, help="a multiple of 1024")
    parser.add_argument("--output", type=Path, help="write the JSON there as well")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    result = {
        "size": arguments.size,
        "devices": DEVICES,
        "results": measure(arguments.size),
        **environment(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
