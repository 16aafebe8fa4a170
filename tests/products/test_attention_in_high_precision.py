"""Attention that is not quantized: by JAX, with cuDNN on GPUs, whose place XLA takes here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.layers.attention_math import attend
from jfp8.products.flash import high_precision
from jfp8.tracing.devices import Gpu
from support.arrays import normal
from support.models import gradients_of

BF16 = jnp.bfloat16
H100, V100 = Gpu("NVIDIA H100", (9, 0)), Gpu("NVIDIA V100", (7, 0))


@pytest.fixture
def asked(monkeypatch):
    """The implementations that JAX was asked for, on an H100 with cuDNN."""
    implementations = []
    by_jax = jax.nn.dot_product_attention

    def instead(q, k, v, bias, mask, *, implementation, **options):
        implementations.append(implementation)
        if implementation == "cudnn":
            assert (q.shape[1] % 2, k.shape[1] % 2) == (0, 0)
            by_score = [x.shape[2:] for x in (bias, mask) if x is not None]
            assert set(by_score) <= {(q.shape[1], k.shape[1])}
        return by_jax(q, k, v, bias, mask, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    monkeypatch.setattr(high_precision, "cudnn_version", lambda: 91100)
    monkeypatch.setattr(high_precision, "current_gpu", lambda *_: H100)
    return implementations


def arrays(tokens, dtype=BF16, depth=16):
    shapes = [(2, tokens, heads, depth) for heads in (4, 2, 2, 4)]
    return [jnp.asarray(normal(shape, i), dtype) for i, shape in enumerate(shapes)]


def with_gradients(function, *operands):
    return [np.asarray(x, np.float64) for x in jax.jit(gradients_of(function))(*operands)]


MASK = np.random.default_rng(0).random((2, 1, 20, 20)) < 0.4
MASK[1, 0, 3] = False  # a query that sees no key
IDS = jnp.asarray(np.repeat([[0, 1], [2, 0]], 10, axis=1))
CASES = {
    "causal": (20, {"is_causal": True}),
    "odd": (19, {}),
    "odd and causal": (19, {"is_causal": True, "local_window_size": (5, 0)}),
    "mask": (20, {"mask": jnp.asarray(MASK)}),
    "mask of keys": (20, {"mask": jnp.asarray(MASK[:, :, :1])}),
    "lengths": (19, {"tokens": (jnp.array([19, 7]), jnp.array([19, 7]), None, None)}),
    "segments": (20, {"tokens": (None, None, IDS, IDS[:, ::-1]), "is_causal": True}),
}
HIDES = "mask", "lengths", "segments"


@pytest.mark.parametrize("case", CASES)
def test_cudnn_computes_the_numbers_of_blocks_in_f32(case, asked, monkeypatch):
    tokens, options = CASES[case]
    run = lambda q, k, v: attend(q, k, v, **({"bias": None, "mask": None} | options), recipe=None)
    found = with_gradients(run, *arrays(tokens))
    assert asked == ["cudnn"]
    f32 = [x.astype(jnp.float32) for x in arrays(tokens)]
    expected = with_gradients(run, *f32)
    assert set(asked[1:]) == {"xla"}, "cuDNN has no f32"
    unseen = [(x[0] == 0).all(-1) for x in (found, expected)]
    np.testing.assert_array_equal(*unseen)
    assert unseen[0].any() == (case in HIDES)
    for x, y in zip(found, expected, strict=True):
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y)


@pytest.mark.parametrize(
    ("tokens", "depth", "options", "dtype", "gpu"),
    [
        (20, 16, {}, BF16, None),
        (20, 16, {}, BF16, V100),
        (20, 16, {}, jnp.float32, H100),
        (20, 12, {}, BF16, H100),
        (20, 16, {"sinks": jnp.zeros(4)}, BF16, H100),
        (20, 16, {"local_window_size": 3}, BF16, H100),
        (19, 16, {"mask": jnp.asarray(MASK[..., :19, :19])}, BF16, H100),
    ],
    ids=["a CPU", "Volta", "f32", "heads of 12", "sinks", "a window of later keys", "odd, a mask"],
)
def test_xla_computes_the_rest(tokens, depth, options, dtype, gpu, asked, monkeypatch):
    monkeypatch.setattr(high_precision, "current_gpu", lambda *_: gpu)
    q, k, v, _ = arrays(tokens, dtype, depth)
    how = {"bias": None, "mask": None, "recipe": None} | options
    jax.eval_shape(functools.partial(attend, **how), q, k, v)
    assert asked == ["xla"]


def test_an_implementation_is_taken_by_name(asked):
    q, k, v, _ = arrays(20)
    for name in ("cudnn", "xla", "emulate", None):
        jfp8.scaled_dot_product_attention(q, k, v, recipe=None, implementation=name)
        jfp8.nnx.DotProductAttention(recipe="qat", implementation=name)(q, k, v)
    assert asked == [*["cudnn"] * 2, *["xla"] * 2, *["cudnn"] * 4]


def test_a_report_says_that_a_recipe_for_weights_has_none_here():
    attend = functools.partial(jfp8.scaled_dot_product_attention, recipe="qat")
    rows = jfp8.report(attend, *arrays(20)[:3]).rows
    assert {row.reason for row in rows} == {"the recipe keeps attention in high precision"}


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32])
def test_lengths_are_any_integers(dtype):
    q, k, v, _ = arrays(20)
    y = attend(q, k, v, None, None, recipe=None, tokens=(jnp.array([20, 3], dtype), *[None] * 3))
    np.testing.assert_array_equal((y == 0).all((2, 3)).sum(1), [0, 17])


def test_mixed_dtypes_have_the_result_of_the_query():
    q, k, v, _ = arrays(20)
    y = jfp8.scaled_dot_product_attention(q.astype(jnp.float32), k, v, recipe=None)
    assert y.dtype == jnp.float32
    assert jfp8.scaled_dot_product_attention(q, k.astype("f4"), v, recipe=None).dtype == BF16
