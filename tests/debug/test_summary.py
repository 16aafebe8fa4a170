"""`summary`: parameters and FP8 state apart. Sizes are counted by hand."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.debug.sizes import Amount, SummaryRow, summary

KEY = jax.random.key(0)
# A product with histories of 16: for each of 3 tensors 16 amaxes and one more, and a check.
HISTORIES = 3 * (16 + 1) + 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jfp8.Dense(8)(nn.gelu(jfp8.Dense(32)(nn.LayerNorm()(x))))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Block()(Block()(x))
        x = nn.BatchNorm(use_running_average=False)(x)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(3, kernel_init=init)(x)


X = jnp.ones((4, 8))
BLOCK = (8 * 32 + 32) + (32 * 8 + 8) + 2 * 8
PARAMS = 2 * BLOCK + 2 * 8 + (8 * 3 + 3)


@functools.cache
def variables():
    return jax.jit(Model().init)(KEY, X)


def test_the_bytes_of_a_row():
    """By shapes and dtypes: f32, bf16, int8, f8 (e4m3fn), and e8m0 scales, each of its own size."""
    fp8 = jfp8.quantize(jnp.ones((64, 96)), granularity=jfp8.Block((32, 1)), scale_rounding="rceil")
    layer = {"kernel": fp8, "bias": jnp.zeros(96, jnp.bfloat16), "gain": jnp.zeros((5, 7))}
    found = summary(
        jfp8.Dense(96),
        {
            "params": {"a_10": {"kernel": jnp.zeros((3, 11), jnp.bfloat16)}, "a_2": layer},
            "fp8": {"a_2": {"a": {"amax_history": jnp.zeros((3, 16)), "amax": jnp.zeros(3)}}},
            "batch_stats": {"a_2": {"seen": jnp.zeros(13, jnp.int8), "mean": jnp.zeros(17)}},
        },
    )
    in_fp8 = 64 * 96 * 1 + 2 * 96 * 1  # one scale for 32 of a column
    first = SummaryRow(
        "a_2",
        params=Amount(64 * 96 + 96 + 35, in_fp8 + 96 * 2 + 35 * 4),
        params_in_fp8=Amount(64 * 96, in_fp8),
        fp8_state=Amount(51, 51 * 4),
        other=Amount(13 + 17, 13 * 1 + 17 * 4),
    )
    assert found.rows == (first, SummaryRow("a_10", params=Amount(33, 33 * 2)))


@pytest.mark.slow
def test_state_of_flaxs_own_fp8_layers():
    fp8 = {"dot_general_cls": nn.Fp8DirectDotGeneralOp}
    model = nn.Sequential([nn.Dense(12, **fp8), nn.Dense(4, use_bias=False, **fp8)])
    total = summary(model, model.init(KEY, jnp.ones((1, 4)))).total
    assert total.params.count == 4 * 12 + 12 + 12 * 4
    assert total.fp8_state.count == 2 * 3 * (1024 + 1)


def test_train_state_adds_the_optimizer():
    state = jfp8.TrainState.create(
        apply_fn=Model().apply, variables=variables(), tx=optax.adam(1e-3)
    )
    found = summary(Model(), state)
    assert found.optimizer == Amount(2 * PARAMS + 1, 4 * (2 * PARAMS + 1))
    assert found.total.params.count == PARAMS
    assert found.total.fp8_state.count == 4 * HISTORIES  # zeros are made as they are needed
    assert "optimizer state 9.44 kB" in str(found)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([jfp8.nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_nnx():
    found = summary(NnxModel(nnx.Rngs(0)))
    assert found.total.params == Amount(2 * 72 + 16, 4 * (2 * 72 + 16))
    assert found.total.fp8_state.count == 2 * (3 * 16 + 1)
    rows = {row.path: row for row in (*found.rows, *found.at_depth(1))}
    assert rows["layers/1"].params.count == 72
    assert rows["layers/1"].fp8_state.count == 3 * 16 + 1
    assert rows["norm"].other.count == 16
    assert rows["dropout/rngs"].other.count == 2  # a key and a counter
    assert rows["layers"].params.count == 144
    model = jfp8.nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    nnx.update(model, jfp8.quantize_params(nnx.state(model, nnx.Param)))
    found = summary(model)
    assert found.total.params_in_fp8 == Amount(128, 128 + 4)
    assert found.total.params == Amount(128 + 16, 128 + 4 + 4 * 16)
    assert "88.9 % in FP8" in str(found)  # 128 of 144


EXPECTED = """\
Model: 1,179 parameters, 4.72 kB; FP8 state 832 B; other variables 64 B

module       parameters    bytes  FP8 state  bytes  other  bytes
----------------------------------------------------------------
BatchNorm_0          16     64 B                       16   64 B
Block_0             568  2.27 kB        104  416 B
Block_1             568  2.27 kB        104  416 B
Dense_0              27    108 B
----------------------------------------------------------------
total             1,179  4.72 kB        208  832 B     16   64 B"""


def test_the_table():
    """Columns that would be empty are left out. Shapes do as well as arrays."""
    assert str(summary(Model(), variables(), depth=1)) == EXPECTED
    assert str(summary(Model(), jax.eval_shape(variables), depth=1)) == EXPECTED
    model = nn.Dense(4)
    text = str(summary(model, model.init(KEY, X)))
    assert "FP8" not in text
    assert "other" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (Model(),), "must be all that model.init returned.*got None"),
        (lambda: (Model(), variables()["params"]), r"'params' in it.*got \['BatchNorm_0', "),
        (lambda: (Model(), X), "got ArrayImpl"),
        (lambda: (NnxModel(nnx.Rngs(0)), {}), r"call summary\(model\), without dict"),
        (lambda: (variables(),), "Flax Linen or NNX module, got dict"),
        (lambda: (Model, variables()), "got type"),
    ],
)
def test_errors_say_what_to_pass(arguments, message):
    with pytest.raises(TypeError, match=message):
        summary(*arguments())
    for depth in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="depth="):
            summary(Model(), variables(), depth=depth)
