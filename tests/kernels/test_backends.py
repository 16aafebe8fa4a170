"""Products of `ScaledArray`s by each backend against float64, and the choice for NVIDIA GPUs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

import jfp8
from jfp8.kernels.backend import Backend, Facts, facts_of
from jfp8.kernels.cuda_backends import choose
from jfp8.kernels.xla import f8_dot as xla
from jfp8.kernels.xla.bf16_dot import in_bf16
from jfp8.matmul.planner import Planner
from jfp8.matmul.spec import MatmulSpec, factors_of
from jfp8.quantizers.blocks import TwoLevel
from jfp8.quantizers.quantizer import Context
from jfp8.scaling.scales import amax
from jfp8.tracing.devices import Gpu
from support.devices import traced_for

PLAIN = (((1,), (0,)), ((), ()))
HOPPER = Gpu("NVIDIA H200", (9, 0))
BLACKWELL = Gpu("NVIDIA B200", (10, 0))


def job(numbers=PLAIN, dtype=jnp.float32, accumulation="f32", powers_of_two=False):
    return MatmulSpec(numbers, np.dtype(dtype), accumulation, False, powers_of_two)


def operands(m=48, k=96, n=40):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(m, k)), rng.normal(size=(k, n))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def of_blocks(scale_rounding):
    x, w = operands()
    quantize = lambda x, block: jfp8.quantize(
        x, granularity=jfp8.Block(block), scale_rounding=scale_rounding
    )
    return quantize(x, (1, 32)), quantize(w, (32, 1))


def of_two_levels(**how):
    x, w = operands()
    quantize = lambda x, axis: TwoLevel(jfp8.E2M1FN, (16, 1), **how)(x, Context((axis,), amax(x)))
    return quantize(x, 1), quantize(w, 0)


@pytest.mark.representative(1)
@pytest.mark.parametrize("backend", [in_bf16, Planner().multiply])
@pytest.mark.parametrize(
    ("make", "powers_of_two"),
    [
        (lambda: of_two_levels(outer="row"), False),
        (of_two_levels, False),
        (lambda: map(jfp8.quantize, operands()), False),
        (lambda: (jfp8.quantize(x, jfp8.E5M2) for x in operands()), False),
        (lambda: of_blocks("rceil"), False),
        (lambda: of_blocks("power_of_two"), True),
    ],
    ids=["NVFP4 by row", "NVFP4", "one scale", "e5m2 by e5m2", "MX", "powers of two"],
)
def test_products(backend, make, powers_of_two):
    """f32 sums of exact products: 96 roundings of the partial sums, and the scales'."""
    lhs, rhs = make()
    y = jax.jit(backend, static_argnums=2)(lhs, rhs, job(powers_of_two=powers_of_two))
    a, b = (np.asarray(q.dequantize(), np.float64) for q in (lhs, rhs))
    bound = 100 * 2.0**-24 * (abs(a) @ abs(b))
    assert (abs(np.asarray(y, np.float64) - a @ b) <= bound).all()
    assert abs(a @ b).max() > 1


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_values_with_any_scale_take_three_products_in_bf16(powers_of_two):
    """With scales that are promised to be powers of two, one is exact."""
    lhs, rhs = of_blocks(None)
    traced = jax.jit(in_bf16, static_argnums=2).trace(lhs, rhs, job(powers_of_two=powers_of_two))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("num_primitive_operations = 3" in text) is not powers_of_two


def test_trap_one_scale_beside_blocks_is_promised_nothing():
    """A promise about scales of blocks; the tensor's would be rounded to bf16, by up to 1/512."""
    x, w = operands(8, 64, 8)
    one = jfp8.ScaledArray(jfp8.quantize(x).data, jnp.float32(1 + 2.0**-8))
    blocks = jfp8.quantize(w, granularity=jfp8.Block((32, 1)), scale_rounding="power_of_two")
    y = jax.jit(in_bf16, static_argnums=2)(one, blocks, job(powers_of_two=True))
    a, b = (np.asarray(q.dequantize(), np.float64) for q in (one, blocks))
    assert (abs(np.asarray(y, np.float64) - a @ b) <= 2.0**-15 * (abs(a) @ abs(b))).all()
    assert abs(a @ b).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("shapes", "numbers", "axes"),
    [
        (((50, 96), (96, 31)), PLAIN, (None, None)),
        (((50, 96), (96, 31)), PLAIN, (0, 1)),
        (((3, 16, 96), (3, 96, 32)), (((2,), (1,)), ((0,), (0,))), (None, (0, 2))),
    ],
    ids=["odd sizes", "by row and column", "batches"],
)
def test_what_cuda_is_given_computes_the_product(shapes, numbers, axes, dtype, monkeypatch):
    """Executed on a CPU, which only refuses the name of the algorithm."""
    dot_general = lax.dot_general
    monkeypatch.setattr(
        xla.lax, "dot_general", lambda *args, precision, **more: dot_general(*args, **more)
    )
    rng = np.random.default_rng(0)
    lhs, rhs = (
        jfp8.quantize(
            jnp.asarray(rng.normal(size=s), jnp.float32),
            granularity=jfp8.PerTensor() if axis is None else jfp8.PerAxis(axis),
        )
        for s, axis in zip(shapes, axes, strict=True)
    )
    of_numbers = replace(job(numbers, dtype), fast_accumulation=True)
    y = xla.cuda(lhs.data, rhs.data, factors_of(lhs, rhs, of_numbers), of_numbers)
    assert y.dtype == dtype
    a, b = (np.asarray(q.dequantize(), np.float64) for q in (lhs, rhs))
    expected, size = a @ b, abs(a) @ abs(b)
    # Rounded as a sum, by a scale that is itself rounded outside of CUDA, and as their product.
    epsilon = float(jnp.finfo(dtype).eps)
    bound = 2 * epsilon * abs(expected) + 100 * 2.0**-24 * size
    assert (abs(np.asarray(y, np.float64) - expected) <= bound).all()


def q(shape, granularity=None, scale_rounding=None, fmt=jfp8.E4M3FN):
    make = lambda x: jfp8.quantize(
        x, fmt, granularity=granularity or jfp8.PerTensor(), scale_rounding=scale_rounding
    )
    return jax.eval_shape(make, jax.ShapeDtypeStruct(shape, jnp.float32))


def name_of(lhs, rhs, gpu):
    return str(choose(facts_of(lhs, rhs, job(powers_of_two=True)), gpu))


LARGE = (4096, 4096)
needs_mosaic = jax.__version_info__ >= (0, 11, 2)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (None, ["xla", "xla", "bf16", "bf16"]),
        (HOPPER, ["xla", *["mosaic_gpu" if needs_mosaic else "xla"], "mosaic_gpu", "bf16"]),
        (BLACKWELL, ["xla", "xla", "cudnn", "cudnn"]),
        (Gpu("NVIDIA H200", (9, 0), partly_manual=True), ["xla", "xla", "bf16", "bf16"]),
        (Gpu("NVIDIA L4", (8, 9)), ["xla", "xla", "bf16", "bf16"]),
        (Gpu("NVIDIA A100", (8, 0)), ["bf16"] * 4),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
@pytest.mark.filterwarnings("ignore:.*Make all axes manual, or none")
def test_choice_by_gpu_and_granularity(gpu, expected):
    """One scale per tensor, by row, in blocks of 128, and MX."""
    pairs = [
        (q(LARGE), q(LARGE)),
        (q(LARGE, jfp8.PerAxis(0)), q(LARGE, jfp8.PerAxis(1))),
        (q(LARGE, jfp8.Block((1, 128))), q(LARGE, jfp8.Block((128, 128)))),
        (q(LARGE, jfp8.Block((1, 32)), "rceil"), q(LARGE, jfp8.Block((32, 1)), "rceil")),
    ]
    if gpu == HOPPER and not needs_mosaic:
        expected = [*expected[:2], "bf16", "bf16"]
    assert [name_of(*pair, gpu).split(":")[0] for pair in pairs] == expected


PER_TENSOR, BY_ROW = (None, None, None), (jfp8.PerAxis(0), jfp8.PerAxis(1), None)
IN_BLOCKS = (jfp8.Block((1, 128)), jfp8.Block((128, 128)), None)
MX = (jfp8.Block((1, 32)), jfp8.Block((32, 1)), "rceil")


@pytest.mark.parametrize(
    ("scales", "gpu", "large"),
    [
        (PER_TENSOR, Gpu("NVIDIA L40S", (8, 9)), 608),
        (PER_TENSOR, BLACKWELL, 1488),
        (MX, BLACKWELL, 864 if needs_mosaic else 2432),
        (IN_BLOCKS, BLACKWELL, 1120 if needs_mosaic else 2352),
        (PER_TENSOR, Gpu("NVIDIA A GPU OF NO TABLE", (8, 9)), 1152),
        (BY_ROW, Gpu("NVIDIA A GPU OF NO TABLE", (8, 9)), 1776),
    ],
    ids=str,
)
def test_small_products_do_not_pay(scales, gpu, large):
    """`large` is the first multiple of 16 whose cube does."""
    lhs, rhs, rounding = scales

    def name(n):
        return name_of(q((n, n), lhs, rounding), q((n, n), rhs, rounding), gpu)

    assert name(large - 16) == "bf16: FP8 does not pay for a product this small"
    assert not name(large).startswith("bf16")
    assert name_of(q((large, large)), q((large, large)), None) == "xla"  # nobody knows the device


@pytest.mark.skipif(not needs_mosaic, reason="JAX 0.11.2 or later has these kernels")
@pytest.mark.parametrize("scales", [PER_TENSOR, BY_ROW, IN_BLOCKS], ids=str)
def test_small_products_pay_where_there_are_kernels(scales):
    """Rounded with XLA's own kernels for bf16 they need more of these, and more bytes."""
    lhs, rhs, rounding = scales
    small = q((256, 256), lhs, rounding), q((256, 256), rhs, rounding)
    assert not name_of(*small, HOPPER).startswith("bf16")


def test_products_are_as_large_as_the_part_of_a_device():
    """Half of 608 x 608 x 608 is small, and all of it on every device of a manual mesh is not."""
    both, gpu = q((608, 608)), Gpu("NVIDIA L40S", (8, 9))
    auto, manual = (
        AbstractMesh((2,), ("x",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Manual)
    )
    assert name_of(both, both, gpu) == "xla"  # nobody says how it is divided
    with use_abstract_mesh(auto):
        assert name_of(both, both, gpu).startswith("bf16: FP8 does not pay")
    with use_abstract_mesh(manual):
        assert name_of(both, both, gpu) == "xla"


def test_e5m2_by_e5m2():
    """XLA knows no such product, though Hopper has one."""
    both = q(LARGE, fmt=jfp8.E5M2)
    assert name_of(both, both, None) == "bf16: XLA has no matmul of e5m2 by e5m2"
    assert name_of(both, both, HOPPER).split(":")[0] == ("mosaic_gpu" if needs_mosaic else "bf16")


def two_levels(block=(16, 1), scale_fmt=jfp8.E4M3FN, shape=LARGE):
    quantizer = TwoLevel(jfp8.E2M1FN, block, scale_fmt=scale_fmt)
    make = lambda x: quantizer(x, Context((1,), amax(x)))
    return jax.eval_shape(make, jax.ShapeDtypeStruct(shape, jnp.float32))


BY_ROWS = (((1,), (1,)), ((), ()))


def test_nvfp4_on_blackwell():
    def chosen(lhs, rhs, gpu=BLACKWELL):
        return choose(facts_of(lhs, rhs, job(BY_ROWS)), gpu)

    assert str(chosen(two_levels(), two_levels((16, 16)))) == "cudnn"
    assert chosen(two_levels((32, 1)), two_levels((32, 1))).backend.name == "cudnn"
    for other, reason in (
        (two_levels((8, 1)), "other blocks than 1x16 and 16x16"),
        (two_levels(scale_fmt=jfp8.E5M2), "not stored in float8_e4m3fn"),
        (q(LARGE, jfp8.Block((1, 16)), fmt=jfp8.E2M1FN), "not stored in float8_e4m3fn"),
        (q(LARGE), "no tensor cores for E2M1FN x E4M3FN"),
    ):
        assert reason in str(chosen(two_levels(), other))
    assert str(chosen(two_levels(), two_levels(), HOPPER)).startswith("bf16: no tensor cores")
    small, large = (two_levels(shape=(n, n)) for n in (3488, 3504))
    assert str(chosen(small, small)) == "bf16: FP8 does not pay for a product this small"
    assert str(chosen(large, large)) == "cudnn"


def test_multiples_of_blocks():
    """Of those that a backend knows, along the sum and across it."""
    some = Backend("some", lambda *_: None, blocks=frozenset({(128, 1), (128, 128)}))
    wide, sizes = np.dtype(np.float32), (256, 256, 256)

    def is_taken(backend, *blocks):
        facts = Facts(
            (jfp8.E4M3FN,) * 2, (wide,) * 2, ((2, 2),) * 2, "blocks", blocks, sizes, "f32"
        )
        return backend.why_not(facts, None) is None

    for block in ((128, 1), (128, 128), (256, 1), (128, 256), (256, 384)):
        assert is_taken(replace(some, multiples=True), block, (128, 1))
        assert is_taken(some, (128, 1), block) == (block in some.blocks)
    for block in (None, (64, 1), (192, 1), (64, 128), (192, 128), (128, 2), (128, 192)):
        assert not is_taken(replace(some, multiples=True), block, (128, 1))
        assert not is_taken(replace(some, multiples=True), (128, 1), block)


def test_the_choice_says_why_each_better_backend_is_not_taken():
    mx = (q(LARGE, jfp8.Block((1, 32)), "rceil"), q(LARGE, jfp8.Block((32, 1)), "rceil"))
    facts = facts_of(*mx, job())
    choice = choose(facts, Gpu("NVIDIA L4", (8, 9)))
    assert choice.backend.name == "bf16"
    assert list(choice.refused) == ["mosaic_gpu", "cudnn", "xla"]
    assert "NVIDIA L4: block-scaled matmuls" in choice.refused["cudnn"]
    assert "vary along the contraction" in choice.refused["xla"]
    assert all(f"{name}: {why}" in str(choice) for name, why in choice.refused.items())
    assert choose(facts, BLACKWELL).backend.name == "cudnn"
    assert list(choose(facts, BLACKWELL).refused) == ["mosaic_gpu"]
    narrow = q(LARGE, fmt=jfp8.E2M1FN)
    assert name_of(narrow, narrow, HOPPER) == "bf16: no tensor cores for E2M1FN x E2M1FN"


def test_blackwell_takes_powers_of_two():
    """In blocks of any multiple of 32; others stay in bf16, and the reason says what helps."""
    lhs, rhs = q(LARGE, jfp8.Block((1, 128))), q(LARGE, jfp8.Block((128, 128)))
    promised, unknown = facts_of(lhs, rhs, job(powers_of_two=True)), facts_of(lhs, rhs, job())
    assert str(choose(promised, BLACKWELL)).startswith("cudnn")
    choice = choose(unknown, BLACKWELL)
    assert choice.backend.name == "bf16"
    assert "set scale_rounding='power_of_two' in the recipe" in choice.refused["cudnn"]
    # A promise about blocks says nothing of the scales of rows beside them, or of a tensor's.
    for other in (q(LARGE, jfp8.PerAxis(1)), q(LARGE)):
        facts = facts_of(lhs, other, job(powers_of_two=True))
        assert "may not be powers of two" in choose(facts, BLACKWELL).refused["cudnn"]
    e8m0 = q(LARGE, jfp8.PerAxis(1), "rceil")
    assert choose(facts_of(lhs, e8m0, job(powers_of_two=True)), BLACKWELL).backend.name == "cudnn"


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA B200"])
def test_models_of_hardware_are_emulated_everywhere(kind):
    multiply = lambda a, b: jfp8.scaled_matmul(a, b, PLAIN, accumulation="hopper")
    both = q((64, 64)), q((64, 64))
    expected = str(jax.make_jaxpr(multiply)(*both))
    with traced_for(kind):
        assert str(jax.make_jaxpr(multiply)(*both)) == expected
