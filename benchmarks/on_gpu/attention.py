"""Attention by cuDNN in FP8, next to cuDNN in bf16: forward, and backward with errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jfp8
from jfp8.scaling.formats import E4M3FN
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.records import Record
from on_gpu.timing import chained, random

Shape = tuple[int, int, int, int]  # batch, length, heads, heads of keys and values
DEPTH = 128  # features of a head: cuDNN's FP8 backward pass takes no other
OPERANDS = ("q", "k", "v", "dO")
RESULTS = ("o", "dQ", "dK", "dV")
Arrays = tuple[jax.Array, ...]
Scales = dict[str, jax.Array]  # by tensor


def attention(settings: Settings) -> Iterator[Group]:
    """Section: causal attention; a call in FP8 quantizes its operands, or has them in FP8."""
    shapes = [(2, 8192, 16, 16), (8, 2048, 16, 16), (4, 2048, 32, 8)]
    if settings.smoke:
        shapes = [(1, 128, 2, 1)]
    for backward, shape in itertools.product((True, False), shapes):
        batch, length, heads, groups = shape
        what = "forward and backward" if backward else "forward"
        name = f"{batch}x{length}, {heads}x{DEPTH}, {groups} of keys, {what}"
        yield Group(name, list(_cases(shape, backward, settings)), "bf16")


def _cases(shape: Shape, backward: bool, settings: Settings) -> Iterator[Case]:
    batch, length, heads, _ = shape
    # Two products, causal, and 2.5 times as much backward, where scores are recomputed.
    flops = int((3.5 if backward else 1) * 2 * batch * length**2 * heads * DEPTH)

    def case(name: str, make: Callable[..., Any], work: Record) -> Case:
        def prepare() -> Timed:
            inputs = _inputs(shape)
            run, arguments = make(inputs)
            called, facts = (lambda *arrays: run(*arrays)[0]), {}
            if backward:
                called = run
                facts = {"relative_errors": _errors(jax.jit(run)(*arguments), inputs)}
            return chained(called, [arguments], settings, calls=4, **work, **facts)

        return Case(name, prepare)

    yield case("bf16", functools.partial(_in_bf16, settings), {"flops_bf16": flops})
    for name, quantizes in (("FP8", False), ("FP8 with quantizing", True)):
        make = functools.partial(_in_fp8, settings, quantizes)
        yield case(name, make, {"flops_f8": flops})


@functools.lru_cache(maxsize=1)
def _inputs(shape: Shape) -> Arrays:
    """Return q, k, v and dO in bf16."""
    batch, length, heads, groups = shape
    return tuple(
        random((batch, length, n, DEPTH), jnp.bfloat16, seed=i)
        for i, n in enumerate((heads, groups, groups, heads))
    )


def _through(attend: Callable[..., jax.Array], q: Any, k: Any, v: Any, do: Any) -> Arrays:
    o, vjp = jax.vjp(attend, q, k, v)
    return o, *vjp(do)


def _in_bf16(settings: Settings, inputs: Arrays) -> tuple[Callable[..., Arrays], Arrays]:
    by = "xla" if settings.smoke else "cudnn"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=by)
    return functools.partial(_through, attend), inputs


def _in_fp8(
    settings: Settings, quantizes: bool, inputs: Arrays
) -> tuple[Callable[..., Arrays], tuple[Any, ...]]:
    """Return attention with scales that earlier steps of the same data left, and its arguments."""
    attend = _stand_in if settings.smoke else by_cudnn
    amaxes = {x: jnp.max(jnp.abs(a)).astype(jnp.float32) for x, a in zip(OPERANDS, inputs)}
    amaxes |= dict.fromkeys((*RESULTS, "dP"), jnp.float32(E4M3FN.max)) | {"s": jnp.float32(1)}

    @jax.jit
    def measured(arrays: Arrays, amaxes: Scales) -> Scales:
        return attend(*_quantized(arrays, amaxes), amaxes)[1]

    for _ in range(3):  # each scale depends on values that the other scales rounded
        amaxes |= measured(inputs, amaxes)

    def run(q, k, v, do, amaxes):
        arrays = _quantized((q, k, v, do), amaxes) if quantizes else (q, k, v, do)
        results, _ = attend(*arrays, amaxes)
        return tuple(
            (y.astype(jnp.float32) * amaxes[name] / E4M3FN.max).astype(jnp.bfloat16)
            for name, y in zip(RESULTS, results, strict=True)
        )

    arrays = inputs if quantizes else jax.jit(_quantized)(inputs, amaxes)
    return run, (*arrays, amaxes)


def _quantized(arrays: Arrays, amaxes: Scales) -> Arrays:
    return tuple(
        jfp8.cast(x.astype(jnp.float32) * E4M3FN.max / amaxes[name], E4M3FN)
        for name, x in zip(OPERANDS, arrays, strict=True)
    )


def by_cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, amaxes: Scales
) -> tuple[Arrays, Scales]:
    """Return o and gradients in FP8, scaled by `amaxes`, and the amaxes of this call."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    parameters = {}
    for key in cudnn.fp8_params_keys:
        kind, _, tensor = key.partition("_")
        amax = amaxes[tensor]
        scale = {"scale": E4M3FN.max / amax, "descale": amax / E4M3FN.max, "amax": amax}[kind]
        parameters[key] = scale.astype(jnp.float32).reshape(1, 1, 1, 1)

    def attend(q, k, v, parameters):
        how = {"scale": DEPTH**-0.5, "mask_type": cudnn.MaskType.CAUSAL, "use_fp8": True}
        return cudnn.dot_product_attention(q, k, v, fp8_params=parameters, **how)

    (o, _, amax), vjp = jax.vjp(attend, q, k, v, parameters)
    dq, dk, dv, seen = vjp((do, jnp.zeros_like(amax), jnp.zeros_like(amax)))
    found = {"o": amax, **{x: seen[f"amax_{x}"] for x in ("dQ", "dK", "dV", "dP")}}
    return (o, dq, dk, dv), {x: y.reshape(()) for x, y in found.items()}


def _stand_in(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, amaxes: Scales
) -> tuple[Arrays, Scales]:
    """Return the same where there is no cuDNN, with nothing but operands and results in FP8."""
    wide = [
        x.astype(jnp.float32) * amaxes[name] / E4M3FN.max
        for name, x in zip(OPERANDS, (q, k, v, do), strict=True)
    ]
    results = dict(zip(RESULTS, _through(_exact, *wide), strict=True))
    cast = tuple(jfp8.cast(y * E4M3FN.max / amaxes[name], E4M3FN) for name, y in results.items())
    return cast, {name: jnp.max(jnp.abs(y)) for name, y in results.items()}


def _exact(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _errors(results: Arrays, inputs: Arrays) -> dict[str, float]:
    """Compare results to those in f32, of one sequence and one head of keys and values."""
    q, k, _, _ = inputs
    share = q.shape[2] // k.shape[2]  # heads of queries for one of keys
    cut = lambda x, n: x[:1, :, :n].astype(jnp.float32)
    exact = jax.jit(functools.partial(_through, _exact))(*map(cut, inputs, (share, 1, 1, share)))
    norm = jnp.linalg.norm
    return {
        name: float(norm((cut(y, e.shape[2]) - e).ravel()) / norm(e.ravel()))
        for name, y, e in zip(RESULTS, results, exact, strict=True)
    }
