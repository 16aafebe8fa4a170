"""Kernels for GPUs, interpreted on a CPU or lowered without cuDNN, by private parts of JAX."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.products.flash import high_precision
from support.devices import traced_for


@contextmanager
def no_races() -> Iterator[None]:
    """Interpret kernels in this context. Races between threads fail the test at the end.

    The GPU has two multiprocessors: sweeps start as many blocks for each, and few do as much.
    """
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    racing = plgpu.InterpretGPUParams(detect_races=True)
    try:
        with traced_for(multiprocessors=2), plgpu.force_gpu_interpret_mode(racing):
            yield
        assert not interpret_pallas_call.get_races().races_found
    finally:
        # The state that a failed kernel left behind would fail the next one.
        interpret_pallas_call.reset_gpu_interpret_mode_state()


def interpreted(kernel, *operands, **options):
    """Return the results of a kernel of whose threads none raced another."""
    with no_races():
        return jax.block_until_ready(kernel(*operands, **options))


@contextmanager
def cudnn_known() -> Iterator[None]:
    """Let JAX lower attention by cuDNN, which compiling for a described GPU does not need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
        patch.setattr(high_precision, "cudnn_version", lambda: 91100)
        yield
