"""Chains of calls in one dispatch, and the contents of a compiled program."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import environment

from on_gpu.cases import Settings, Timed
from on_gpu.device_time import has_cupti
from on_gpu.harness import running
from on_gpu.records import Record

CHAIN = 12  # calls in one dispatch
COPIES = 4  # copies of each operand, in turn, so that none is still in L2 (60 MB)


def random(shape: Sequence[int], dtype: Any, *, seed: int = 0) -> jax.Array:
    """Normally distributed values: on zeros, products run faster than on data."""
    x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    return jax.block_until_ready(x.astype(dtype))


def copies(make: Callable[[int], Any], settings: Settings) -> Callable[[], list[Any]]:
    """``[make(0), make(1), ...]``, made once and only if somebody asks."""
    return functools.cache(lambda: [make(seed) for seed in range(1 if settings.smoke else COPIES)])


def chained(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    settings: Settings,
    *,
    calls: int = CHAIN,
    name: str | None = None,
    **facts: Any,
) -> Timed:
    """`calls` calls of `function` in one program, on each of `arguments` in turn.

    Every call has separate parameters in the program, though they share buffers, so that the
    compiler cannot merge equal calls. If the device's own times are unavailable, a
    third of the calls are compiled too, for `Timed.shorter`.

    Args:
      function: takes and returns arrays; the program returns all results.
      arguments: tuples of arguments.
      settings: with ``settings.hlo`` and a `name`, one call's compiled program is written there.
      calls: number of calls in one program.
      name: name of the file.
      facts: for the record.
    """
    calls = 1 if settings.smoke else calls
    sets = [arguments[i % len(arguments)] for i in range(calls)]
    once = jax.jit(function)
    chain = jax.jit(lambda sets: [once(*s) for s in sets])
    start = time.perf_counter()
    compiled = chain.lower(sets).compile()
    seconds = time.perf_counter() - start
    record = {**facts, "compile_s": round(seconds, 2), "program": described(compiled, calls)}
    if settings.hlo and name:
        save(jax.jit(function).lower(*sets[0]).compile(), settings.hlo, name)
    timed = Timed(functools.partial(compiled, sets), calls, record)
    if calls > 1 and not has_cupti():
        few = sets[: max(1, calls // 3)]
        shorter = functools.partial(chain.lower(few).compile(), few)
        timed = dataclasses.replace(timed, shorter=shorter, shorter_calls=len(few))
    running()
    jax.block_until_ready(timed.run())
    if timed.shorter:
        jax.block_until_ready(timed.shorter())
    return timed


def save(compiled: jax.stages.Compiled, folder: str, name: str) -> None:
    """Write the optimized program to ``folder/name.hlo``."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / (re.sub(r"[^\w.-]+", "_", name).strip("_") + ".hlo")).write_text(
        compiled.as_text() or ""
    )


# The kernel that an instruction of an optimized program calls, and the autotuner's choice for it.
_KERNELS = {
    "cublasLt f8": r'custom_call_target="__cublas\$lt\$matmul\$f8"',
    "cublasLt": r'custom_call_target="__cublas\$lt\$matmul"',
    "cublas": r'custom_call_target="__cublas\$gemm"',
    "cudnn": r'custom_call_target="__cudnn',
    "mosaic_gpu": r'custom_call_target="mosaic_gpu',
    "triton product": r'"kind":"__triton_(?:nested_)?gemm',
    "dot": r" dot\(",  # not in a library's kernel: in a fusion, or on a CPU
    "fusions": r" fusion\(",
    "transposes": r"^ *(?:ROOT )?%?[\w.-]*transpose[\w.-]* = .*? (?:fusion|transpose)\(",
}
_PICKS = {
    "cublasLt f8": r'matmul\$f8".*?"selected_algorithm":"?(-?\d+)',
    "cublas": r'__cublas\$(?:lt\$matmul|gemm)".*?"selected_algorithm":"?(-?\d+)',
    "triton": r'__triton.*?"(?:block_level_fusion_config|triton_gemm_config)":\{(.{1,120})',
}


def described(compiled: jax.stages.Compiled, calls: int = 1) -> Record:
    """Kernels of the program for each of its calls, what the autotuner picked, and its memory."""
    kernels: collections.Counter[str] = collections.Counter()
    picked: collections.Counter[str] = collections.Counter()
    entry = False  # within the main computation, where a fusion is a kernel
    for line in (compiled.as_text() or "").splitlines():
        line = line[:4000]  # a Mosaic kernel is one line of up to a megabyte
        entry = line.startswith("ENTRY") or (entry and not line.startswith("}"))
        for kind, pattern in _KERNELS.items():
            if (entry or kind == "dot") and re.search(pattern, line):
                kernels[kind] += 1
        for kind, pattern in _PICKS.items():
            if found := re.search(pattern, line):
                picked[f"{kind} {found[1]}"] += 1
    return {
        "kernels": {name: round(n / calls, 2) for name, n in kernels.items()},
        "picked": dict(picked),
        "memory": memory(compiled),
    }


def memory(compiled: jax.stages.Compiled) -> Record | None:
    """Bytes of arguments, results and temporaries, as the compiler planned them."""
    try:
        analysis = compiled.memory_analysis()
        return {
            "arguments": analysis.argument_size_in_bytes,
            "results": analysis.output_size_in_bytes,
            "temporaries": analysis.temp_size_in_bytes,
            "peak": getattr(analysis, "peak_memory_in_bytes", None),
        }
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def begin(settings: Settings) -> Record:
    """Prepare a worker: interpret kernels in a smoke test, and name device and versions."""
    if settings.smoke:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.set_gpu_interpret_mode()
    device = jax.devices()[0]
    record = environment()
    versions = dict(record["versions"])
    for package in ("jaxlib", "optax", "torch", "jax-cuda13-plugin", "nvidia-cublas"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    stats = device.memory_stats() or {}
    return {
        **record,
        "versions": versions,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "multiprocessors": getattr(device, "core_count", None),
        "memory_bytes": stats.get("bytes_limit"),
    }
