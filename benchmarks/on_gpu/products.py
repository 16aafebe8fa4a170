"""Matmuls by all implementations: ceilings, FP8, accumulation errors, and facts about XLA."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops
from jax import lax

import jfp8
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.granularity import Block, PerAxis
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.harness import running
from on_gpu.kernels import kernel
from on_gpu.records import Record
from on_gpu.shapes import Shape, name_of, shapes
from on_gpu.timing import chained, copies, described, random

NT = (((1,), (1,)), ((), ()))  # y[i, j] = sum_k a[i, k] b[j, k]
FAST = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
FULL = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


# Ceilings.


def ceilings(settings: Settings) -> Iterator[Group]:
    """Section: upper limits of speed, a large product in bf16 and FP8, and a large copy."""
    m, n, k = shape = shapes(settings)[0]
    flops = 2 * m * n * k
    pairs = copies(lambda i: _normal_pair(shape, jnp.bfloat16, i), settings)
    quantized = copies(lambda i: _normal_pair(shape, E4M3FN.dtype, i), settings)
    scale = jnp.float32(0.5)

    algorithm = None if settings.smoke else FAST  # no CPU has it

    def scaled(a, b, scale):
        y = lax.dot_general(a, b, NT, precision=algorithm, preferred_element_type=jnp.bfloat16)
        return y * scale.astype(jnp.bfloat16)

    cases = [
        Case("bf16 product", lambda: chained(bf16_product, pairs(), settings, flops_bf16=flops)),
        Case(
            "FP8 product, fast accumulation",
            lambda: chained(
                scaled, [(a, b, scale) for a, b in quantized()], settings, flops_f8=flops
            ),
        ),
    ]
    yield Group(f"product {name_of(shape)}", cases, "bf16 product")

    # The overhead of starting a program and waiting for it; chains make its share small.
    yield Group("program", [Case("empty", lambda: _empty(settings))])

    size = (256, 256) if settings.smoke else (16384, 16384)
    arrays = copies(lambda i: (random(size, jnp.bfloat16, seed=i),), settings)
    work = {"bytes": 4 * math.prod(size)}
    cases = [
        Case("copy", lambda: chained(jnp.copy, arrays(), settings, calls=4, **work)),
        Case("negation", lambda: chained(lambda x: -x, arrays(), settings, calls=4, **work)),
    ]
    yield Group(f"copy {size[0]}x{size[1]} bf16", cases, "copy")


def _empty(settings: Settings) -> Timed:
    return chained(lambda x: x + 1, [(jnp.float32(0),)], settings, calls=1, bytes=8)


def bf16_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, NT, preferred_element_type=jnp.bfloat16)


def _normal_pair(shape: Shape, dtype: Any, seed: int) -> tuple[jax.Array, jax.Array]:
    m, n, k = shape
    return random((m, k), dtype, seed=2 * seed), random((n, k), dtype, seed=2 * seed + 1)


# FP8 matmuls.


def products(settings: Settings) -> Iterator[Group]:
    """Section: quantized operands to bf16, and Flax's operations from bf16 to bf16."""
    for shape in shapes(settings):
        yield Group(name_of(shape), list(_product_cases(shape, settings)), "bf16")


def _product_cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    m, n, k = shape
    work: Record = {
        "flops_f8": 2 * m * n * k,
        "bytes": m * k + n * k + 2 * m * n,
    }
    bf16 = copies(lambda i: _normal_pair(shape, jnp.bfloat16, i), settings)

    @functools.cache
    def operands(granularity: tuple[Any, Any]) -> list[tuple[jfp8.ScaledArray, jfp8.ScaledArray]]:
        @jax.jit
        def quantized(a, b):
            how = {"scale_rounding": "power_of_two"}
            return tuple(
                jfp8.quantize(x, granularity=g, **how)
                for x, g in zip((a, b), granularity, strict=True)
            )

        return [quantized(a, b) for a, b in bf16()]

    tensor = jfp8.PerTensor(), jfp8.PerTensor()
    rows = PerAxis(0), PerAxis(0)
    blocks = Block((1, 128)), Block((128, 128))

    def ours(granularity: tuple[Any, Any], **options: Any) -> Callable[[], Timed]:
        def multiply(a, b):
            return jfp8.scaled_matmul(a, b, NT, preferred_element_type=jnp.bfloat16, **options)

        return lambda: chained(multiply, operands(granularity), settings, **work)

    yield Case(
        "bf16",
        lambda: chained(
            bf16_product,
            bf16(),
            settings,
            flops_bf16=work["flops_f8"],
            bytes=2 * (m * k + n * k + m * n),
        ),
    )
    by_mosaic = {"implementation": "mosaic_gpu"}
    every_128 = {"accumulation": "f32_every_128"}
    fast, full = ({"fast_accumulation": allowed} for allowed in (True, False))
    yield Case("jfp8 xla fast", ours(tensor, implementation="xla", **fast))
    yield Case("jfp8 mosaic_gpu fast", ours(tensor, **by_mosaic, **fast), ("matmul",))
    blocks_case = ours(blocks, **by_mosaic, **every_128)
    yield Case("jfp8 mosaic_gpu blocks", blocks_case, ("block_matmul",))
    with_torch = not settings.smoke and importlib.util.find_spec("torch") is not None
    if with_torch:
        yield Case("PyTorch _scaled_mm fast", lambda: _torch_product(shape, True, False, work))
    yield Case("jfp8 xla full", ours(tensor, implementation="xla", **full))
    yield Case("jfp8 mosaic_gpu full", ours(tensor, **by_mosaic, **full), ("matmul",))
    yield Case("jfp8 mosaic_gpu rows fast", ours(rows, **by_mosaic, **fast), ("matmul",))
    for op in FLAX_OPS:
        forward = functools.partial(_flax_forward, op, bf16, settings, work)
        yield Case(f"Flax {op}, with quantization", forward)
    yield Case(
        "XLA no algorithm",
        lambda: chained(
            _no_preset,
            [(a.data, b.data, a.scale * b.scale) for a, b in operands(tensor)],
            settings,
            **work,
        ),
    )
    yield Case(
        "XLA dequantized operands",
        lambda: chained(
            _dequantized,
            [(a.data, b.data, a.scale, b.scale) for a, b in operands(tensor)],
            settings,
            **work,
        ),
    )
    if settings.smoke:
        return
    yield Case("jfp8 mosaic_gpu rows full", ours(rows, **by_mosaic, **full), ("matmul",))
    yield Case("jfp8 xla rows fast", ours(rows, implementation="xla", **fast))
    if not with_torch:
        return
    yield Case("PyTorch _scaled_mm full", lambda: _torch_product(shape, False, False, work))
    for allowed, label in ((True, "fast"), (False, "full")):
        multiply = functools.partial(_torch_product, shape, allowed, True, work)
        yield Case(f"PyTorch _scaled_mm rows {label}", multiply)
    yield Case("PyTorch bf16", lambda: _torch_bf16(shape, work))


def _no_preset(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    y = lax.dot_general(a, b, NT, preferred_element_type=jnp.bfloat16)
    return y * scale.astype(jnp.bfloat16)


def _dequantized(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    """The pattern that XLA is to recognise: dequantize, then multiply."""
    a, b = (
        x.astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for x, s in ((a, a_scale), (b, b_scale))
    )
    return bf16_product(a, b)


FLAX_OPS = {
    "Fp8DirectDotGeneralOp": fp8_ops.Fp8DirectDotGeneralOp,
    "Fp8DotGeneralOp": fp8_ops.Fp8DotGeneralOp,
}


def flax_op(name: str) -> nn.Module:
    """The operation; one of them warns that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FLAX_OPS[name]()


def _flax_forward(op: str, bf16: Any, settings: Settings, work: Record) -> Timed:
    module = flax_op(op)
    pairs = bf16()
    variables = module.init(jax.random.key(0), *pairs[0], NT)

    def forward(variables, a, b):
        return module.apply(variables, a, b, NT)

    quantize = 3 * (pairs[0][0].size + pairs[0][1].size)
    arguments = [(variables, *pair) for pair in pairs]
    return chained(forward, arguments, settings, **{**work, "bytes": work["bytes"] + quantize})


def _torch_timed(function: Callable[[], Any], calls: int, **facts: Any) -> Timed:
    import torch

    def run(times: int) -> None:
        for _ in range(times):
            function()
        torch.cuda.synchronize()

    running()
    run(calls)
    few = calls // 3
    return Timed(functools.partial(run, calls), calls, facts, functools.partial(run, few), few)


def _torch_operands(shape: Shape, dtype: Any) -> Iterator[tuple[Any, Any]]:
    """Endless pairs ``a[m, k], b[n, k]`` from four, in turn."""
    import torch

    m, n, k = shape
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    pairs = [(draw(m, k).to(dtype), draw(n, k).to(dtype)) for _ in range(4)]
    while True:
        yield from pairs


def _torch_product(shape: Shape, fast: bool, by_rows: bool, work: Record) -> Timed:
    import torch

    m, n, _ = shape
    pairs = _torch_operands(shape, torch.float8_e4m3fn)
    a_scale = torch.rand((m, 1) if by_rows else (), device="cuda", dtype=torch.float32)
    b_scale = torch.rand((1, n) if by_rows else (), device="cuda", dtype=torch.float32)

    def multiply():
        a, b = next(pairs)
        return torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_scale,
            scale_b=b_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return _torch_timed(multiply, 12, **work)


def _torch_bf16(shape: Shape, work: Record) -> Timed:
    import torch

    pairs = _torch_operands(shape, torch.bfloat16)

    def multiply():
        a, b = next(pairs)
        return a @ b.t()

    m, n, k = shape
    return _torch_timed(
        multiply, 12, flops_bf16=work["flops_f8"], bytes=2 * (m * k + n * k + m * n)
    )


# Accumulation.


def accumulation(settings: Settings) -> Iterator[Group]:
    """Section: errors of long sums against float64, and the model of Hopper's against Hopper."""
    m, n, k = (16, 16, 512) if settings.smoke else (128, 128, 16384)
    for label, positive in (("positive", True), ("normal", False))[: 1 if settings.smoke else 2]:
        draw = np.random.default_rng(3)
        a, b = (draw.standard_normal((size, k), dtype=np.float32) for size in (m, n))
        if positive:
            a, b = np.abs(a), np.abs(b)
        a, b = (np.asarray(jfp8.cast(x, E4M3FN)) for x in (a, b))
        exact = a.astype(np.float64) @ b.astype(np.float64).T
        yield Group(
            f"{label} data, {m}x{k}x{n}, f32 result",
            [
                Case(name, functools.partial(_error_of, f, a, b, exact), kernels)
                for name, (f, kernels) in _SUMS.items()
                if not (settings.smoke and name.startswith("XLA") and "algorithm" in name)
            ],
        )


def _xla_sum(precision: Any) -> Callable[..., jax.Array]:
    def product(a, b):
        return lax.dot_general(a, b, NT, precision=precision, preferred_element_type=jnp.float32)

    return product


def _mosaic_sum(promote: bool) -> Callable[..., jax.Array]:
    one = np.float32(1)
    return lambda a, b: kernel("matmul")(
        a, b, jnp.asarray(one), jnp.asarray(one), jnp.float32, promote=promote
    )


def _mosaic_blocks(a: jax.Array, b: jax.Array) -> jax.Array:
    blocks = -(-a.shape[1] // 128)
    a_scale = jnp.ones((blocks, a.shape[0]), jnp.float32)
    b_scale = jnp.ones((blocks, -(-b.shape[0] // 128)), jnp.float32)
    return kernel("block_matmul")(a, b, a_scale, b_scale, jnp.float32)


def _emulated(accumulation: str) -> Callable[..., jax.Array]:
    one = jnp.ones((), jnp.float32)
    return lambda a, b: jfp8.scaled_matmul(
        jfp8.ScaledArray(a, one),
        jfp8.ScaledArray(b, one),
        NT,
        accumulation=accumulation,
        implementation="emulate",
    )


_SUMS: Mapping[str, tuple[Callable[..., jax.Array], tuple[str, ...]]] = {
    "XLA algorithm fast": (_xla_sum(FAST), ()),
    "XLA algorithm full": (_xla_sum(FULL), ()),
    "XLA no algorithm": (_xla_sum(None), ()),
    "XLA no algorithm, HIGHEST": (_xla_sum(lax.Precision.HIGHEST), ()),
    "mosaic_gpu fast": (_mosaic_sum(False), ("matmul",)),
    "mosaic_gpu full": (_mosaic_sum(True), ("matmul",)),
    "mosaic_gpu blocks": (_mosaic_blocks, ("block_matmul",)),
    "emulated f32": (_emulated("f32"), ()),
    "emulated hopper": (_emulated("hopper"), ()),
    "emulated hopper_every_128": (_emulated("hopper_every_128"), ()),
}


def _error_of(
    function: Callable[..., jax.Array], a: np.ndarray, b: np.ndarray, exact: np.ndarray
) -> Record:
    compiled = jax.jit(function).lower(a, b).compile()
    running()
    y = np.asarray(compiled(a, b))
    error = y.astype(np.float64) - exact
    record: Record = {
        "relative_error": float(np.linalg.norm(error) / np.linalg.norm(exact)),
        "mean_error": float(np.mean(error) / np.mean(np.abs(exact))),
        "program": described(compiled),
    }
    for model in ("hopper", "hopper_every_128"):
        expected = _model(model, a.tobytes(), b.tobytes(), a.shape, b.shape)
        record[f"equal_to_{model}"] = float(np.mean(y.view(np.uint32) == expected))
    return record


@functools.cache
def _model(
    accumulation: str, a: bytes, b: bytes, a_shape: tuple[int, int], b_shape: tuple[int, int]
) -> np.ndarray:
    """Bits of the emulated product, computed on the CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = [
            np.frombuffer(data, E4M3FN.dtype).reshape(shape)
            for data, shape in ((a, a_shape), (b, b_shape))
        ]
        return np.asarray(jax.jit(_emulated(accumulation))(*arrays)).view(np.uint32)


# Facts.


def facts(settings: Settings) -> Iterator[Group]:
    """Section: the code's assumptions about XLA's compiler, and the actual behavior."""
    size = 256 if settings.smoke else 4096
    a = b = jax.ShapeDtypeStruct((size, size), E4M3FN.dtype)
    scale = jax.ShapeDtypeStruct((), jnp.float32)

    def preset(a, b, scale, *, precision):
        y = lax.dot_general(a, b, NT, precision=precision, preferred_element_type=jnp.bfloat16)
        return y * scale.astype(jnp.bfloat16)

    def program(
        expected: str, function: Callable[..., Any], *arguments: Any
    ) -> Callable[[], Record]:
        def look() -> Record:
            return {
                "expected": expected,
                "program": described(jax.jit(function).lower(*arguments).compile()),
            }

        return look

    def highest() -> Record:
        draw = np.random.default_rng(4)
        shape = (64, 512) if settings.smoke else (256, 16384)
        a, b = (jfp8.cast(draw.standard_normal(shape, np.float32), E4M3FN) for _ in range(2))
        default, highest = (
            np.asarray(jax.jit(_xla_sum(p))(a, b)) for p in (None, lax.Precision.HIGHEST)
        )
        return {
            "expected": "ignored without an algorithm: the same bits as DEFAULT",
            "same_bits": bool((default.view(np.uint32) == highest.view(np.uint32)).all()),
        }

    cases = [
        Case(
            "algorithm, fast",
            program("one cublasLt f8", functools.partial(preset, precision=FAST), a, b, scale),
        ),
        Case(
            "algorithm, full",
            program("one cublasLt f8", functools.partial(preset, precision=FULL), a, b, scale),
        ),
        Case(
            "no algorithm",
            program("the autotuner's choice: Triton or cublasLt f8", _no_preset, a, b, scale),
        ),
        Case(
            "dequantized operands",
            program("no FP8 product: a bf16 product", _dequantized, a, b, scale, scale),
        ),
        Case("Precision.HIGHEST", highest),
    ]
    if settings.smoke:
        cases = cases[2:]  # no CPU has these algorithms
    yield Group(f"programs of {size}x{size}x{size}", cases)
