"""Which backend multiplies on a TPU."""

from __future__ import annotations

from dataclasses import replace

import jax

from jfp8.kernels.backend import Choice, Facts, check_not_refused, facts_of
from jfp8.kernels.tpu import backend as mosaic
from jfp8.kernels.xla import bf16_dot, f8_dot
from jfp8.matmul.bias import plus_bias
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.device import Tpu
from jfp8.tracing.notes import note

# The first that supports the product is used.
BACKENDS = (mosaic.BACKEND, mosaic.BLOCK_BACKEND, f8_dot.BACKEND, bf16_dot.BACKEND)


def multiply(
    lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec, bias: jax.Array | None = None
) -> jax.Array:
    """Return the product of two operands, and a bias, by the named backend or the best one.

    Raises:
      NotImplementedError: the named backend cannot compute it.
    """
    facts, tpu = facts_of(lhs, rhs, spec), spec.device
    if spec.implementation == mosaic.BACKEND.name:
        named = BACKENDS[:2]
        backend = next((b for b in named if facts.granularity in b.granularities), named[0])
        check_not_refused(spec.implementation, backend.why_not(facts, tpu))
        text = mosaic.BACKEND.name
    else:
        choice = choose_on_tpu(facts, tpu if isinstance(tpu, Tpu) else None)
        backend, text = choice.backend, str(choice)
    with note("tpu", text):
        if backend in BACKENDS[:2]:  # the kernel adds a bias by itself
            return mosaic.by_mosaic(lhs, rhs, spec, bias)
        return plus_bias(backend.multiply(lhs, rhs, spec), bias)


def choose_on_tpu(facts: Facts, device: Tpu | None) -> Choice:
    """Return the backend for a product on a TPU; None: for any, by XLA.

    1. The Pallas kernel, which takes f8 codes with scales for tensors, rows and columns, and
       dequantizes blocks with powers of two to bf16 as it reads them.
    2. By XLA: f8 arrays, which TPU7x multiplies, and others convert to bf16 on the way. What has
       scales that vary along the sum, in bf16.
    """
    facts = replace(facts, accumulation="f32")
    refused: dict[str, str] = {}
    for backend in BACKENDS if device is not None else BACKENDS[2:]:
        if facts.granularity not in backend.granularities and backend in BACKENDS[:2]:
            continue  # the same kernel takes them in another way
        reason = backend.why_not(facts, device)
        if reason is None:
            return Choice(backend, refused)
        refused[backend.name] = reason
    raise AssertionError("bf16 takes everything")
