"""Attention that is not quantized: by blocks, and on GPUs by cuDNN, whose place XLA takes here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8.kernels.xla import cudnn_flash
from jfp8.layers.attention import attend
from jfp8.matmul.planner import Planner
from jfp8.products.flash import dot_product
from jfp8.tracing.devices import Gpu
from support.arrays import normal
from support.models import gradients_of

BF16 = jnp.bfloat16
H100, V100 = Gpu("NVIDIA H100", (9, 0)), Gpu("NVIDIA V100", (7, 0))


@pytest.fixture
def planned(monkeypatch):
    """The specs that were planned by, and whether cuDNN was called."""
    specs, called = [], []
    monkeypatch.setattr(cudnn_flash, "cudnn_version", lambda: 91100)
    by_xla = jax.nn.dot_product_attention

    def instead(*arrays, implementation, **options):
        assert implementation == "cudnn"
        assert not any(x.shape[1] % 2 for x in arrays[:3])
        called.append(options)
        return by_xla(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)

    class OnH100(Planner):
        def attention(self, spec):
            specs.append(spec)
            refused = cudnn_flash.refusal(spec, H100)
            return spec.reference() if refused else cudnn_flash.FlashAttention()

    monkeypatch.setattr(dot_product, "planner_of", lambda *_: OnH100())
    return specs, called


def arrays(tokens, dtype=BF16, depth=16):
    shapes = [(2, tokens, heads, depth) for heads in (4, 2, 2, 4)]
    return [jnp.asarray(normal(shape, i), dtype) for i, shape in enumerate(shapes)]


def with_gradients(function, *operands):
    return [np.asarray(x, np.float64) for x in jax.jit(gradients_of(function))(*operands)]


MASK = np.random.default_rng(0).random((2, 1, 20, 20)) < 0.4
MASK[1, 0, 3] = False  # a query that sees no key
CASES = {
    "causal": (20, {"is_causal": True}),
    "odd": (19, {}),
    "odd and causal": (19, {"is_causal": True, "local_window_size": (5, 0)}),
    "mask": (20, {"mask": jnp.asarray(MASK)}),
    "lengths": (19, {"tokens": (jnp.array([19, 7]), jnp.array([19, 7]), None, None)}),
}


@pytest.mark.parametrize("case", CASES)
def test_cudnn_computes_what_blocks_do(case, planned):
    tokens, options = CASES[case]
    bias, mask = None, options.get("mask")
    options = {name: x for name, x in options.items() if name != "mask"}
    run = lambda q, k, v: attend(q, k, v, bias, mask, recipe=None, **options)
    found = with_gradients(run, *arrays(tokens))
    assert len(planned[1]) == 1
    f32 = [x.astype(jnp.float32) for x in arrays(tokens)]
    expected = with_gradients(run, *f32)
    assert len(planned[1]) == 1, "f32 is computed by blocks"
    unseen = [(x[0] == 0).all(-1) for x in (found, expected)]
    np.testing.assert_array_equal(*unseen)
    assert unseen[0].any() == (case in ("mask", "lengths"))
    for x, y in zip(found, expected, strict=True):
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y)


@pytest.mark.parametrize(
    ("tokens", "depth", "options", "dtype", "gpu", "reason"),
    [
        (20, 16, {}, BF16, None, "no GPU"),
        (20, 16, {}, BF16, V100, "8.0 or later"),
        (20, 16, {}, jnp.float32, H100, "for bf16 and f16"),
        (20, 12, {}, BF16, H100, "heads of 12"),
        (20, 16, {"sinks": jnp.zeros(4)}, BF16, H100, "sinks"),
        (20, 16, {"tokens": (None, None, *[jnp.zeros((2, 20), int)] * 2)}, BF16, H100, "segments"),
        (20, 16, {"local_window_size": 3}, BF16, H100, "a window of later keys"),
        (19, 16, {"mask": jnp.asarray(MASK[..., :19, :19])}, BF16, H100, "odd number"),
    ],
)
def test_what_cudnn_does_not_compute(tokens, depth, options, dtype, gpu, reason, planned):
    q, k, v, _ = arrays(tokens, dtype, depth)
    mask = options.get("mask")
    options = {name: x for name, x in options.items() if name != "mask"}
    run = functools.partial(attend, recipe=None, **options)
    jax.eval_shape(lambda q, k, v: run(q, k, v, None, mask), q, k, v)
    assert reason in cudnn_flash.refusal(planned[0][-1], gpu)
