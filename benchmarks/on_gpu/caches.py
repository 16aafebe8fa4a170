"""Folders that keep compiled programs, and choices of XLA's autotuner, for the next process."""

from __future__ import annotations

import os
from pathlib import Path

RUNS = Path(__file__).parents[2] / "runs"  # ignored by git


def caches() -> dict[str, str]:
    """Return variables for a worker; existing values are kept.

    JAX keeps XLA's choices among kernels in a subfolder of the compiled programs.
    """
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(RUNS / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "xla_gpu_per_fusion_autotune_cache_dir",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
