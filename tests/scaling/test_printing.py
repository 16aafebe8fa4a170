"""What prints: short, true, and never an error."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jfp8
from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, Block, PerAxis, ScaledArray, recipes
from jfp8.optim.block_storage import ExpandedArray
from jfp8.optim.storage import HalfArray
from jfp8.quantizers.rotations import Hadamard, RandomHadamard
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.product import Product
from jfp8.recipes.rowwise import RowwiseScaling
from jfp8.scaling.printing import dtype, listed, number

# 448 = 7 * 64 is the largest value of e4m3fn: the scale is exactly 1/64, and so are the values.
X = jnp.array([[-3.5, 1.0], [0.5, 7.0]])


def test_a_scale_for_all_and_for_each_row():
    assert repr(jfp8.quantize(X)) == "ScaledArray(E4M3FN[2,2], scale 0.01562, values -3.5 to 7)"
    q = jfp8.quantize(X, granularity=PerAxis(0))
    assert repr(q) == (
        "ScaledArray(E4M3FN[2,2], scales f32[2,1] for [1,2] each, 0.007812 to 0.01562, "
        "values -3.5 to 7)"
    )


def test_the_first_few_names_are_listed():
    assert (listed("abcd"), listed("abcde")) == ("a, b, c, d", "a, b, c, d and 1 more")
    assert listed("abc", 2, between="; ") == "a; b; and 1 more"


def test_blocks_cut_short():
    x = jnp.concatenate([jnp.full((3, 32), 448.0), jnp.full((3, 5), 224.0)], axis=1)
    q = jfp8.quantize(x, granularity=Block((2, 32)), scale_rounding="rceil")
    assert repr(q) == (
        "ScaledArray(E4M3FN[3,37], scales E8M0FNU[2,2] for [2,32] each, 0.5 to 1, "
        "values 224 to 448)"
    )


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E3M4], ids=lambda fmt: fmt.name)
def test_values_are_those_of_dequantize(fmt):
    codes = np.arange(256, dtype=np.uint8)
    data = jnp.asarray(codes if fmt is E3M4 else codes.view(fmt.dtype))
    q = ScaledArray(data, jnp.float32(2.0))
    values = np.asarray(q.dequantize())
    finite = values[np.isfinite(values)]
    text = repr(q)
    assert text.startswith(f"ScaledArray({fmt.name}[256], scale 2, values ")
    if fmt is not E5M2:  # E5M2 has Inf
        low, high = map(float, re.search(r"values (\S+) to (\S+) and", text).groups())
        assert (low, high) == (finite.min(), finite.max())
    assert text.endswith(f"and {np.isnan(values).sum()} NaN)")


def test_nan_and_inf_are_counted():
    x = X.at[0, 1].set(jnp.nan).at[1, 0].set(jnp.inf)
    assert repr(jfp8.quantize(x)).endswith("values -3.5 to 7 and 2 NaN)")
    assert repr(jfp8.quantize(jnp.full((3,), jnp.nan))).endswith("values all NaN)")


def test_empty_array_and_carrier():
    assert repr(jfp8.quantize(jnp.zeros((0, 3)))) == "ScaledArray(E4M3FN[0,3], scale 1)"
    carried = dataclasses.replace(jfp8.quantize(X), carrier=jnp.zeros((2, 2), jnp.bfloat16))
    assert repr(carried).endswith("values -3.5 to 7, carrier bf16[2,2])")


def test_tracers_and_shapes():
    seen = []
    jax.jit(lambda q: seen.append(repr(q)))(jfp8.quantize(X))
    jax.vmap(lambda x: seen.append(repr(jfp8.quantize(x))))(X)
    assert seen == ["ScaledArray(E4M3FN[2,2], scale f32[])", "ScaledArray(E4M3FN[2], scale f32[])"]
    assert repr(jax.eval_shape(lambda: jfp8.quantize(X))) == seen[0]
    blocks = jax.eval_shape(lambda: jfp8.quantize(X, granularity=Block((1, 2))))
    assert repr(blocks) == "ScaledArray(E4M3FN[2,2], scales f32[2,1] for [1,2] each)"


def test_nothing_is_traced():
    q = jfp8.quantize(X)

    def traced(x):
        assert "values -3.5 to 7" in repr(q)
        return x

    assert not jax.make_jaxpr(traced)(1.0).jaxpr.eqns


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (lambda x: np.asarray(x), "ScaledArray(E4M3FN[2,2], scale 0.01562, values -3.5 to 7)"),
        (lambda x: None, "ScaledArray(None, scale None)"),
        (lambda x: PartitionSpec(), f"ScaledArray({PartitionSpec.__name__}, scale P"),
        (lambda x: 0, "ScaledArray(0, scale 0)"),
    ],
)
def test_any_leaves(leaf, expected):
    assert repr(jax.tree.map(leaf, jfp8.quantize(X))).startswith(expected)


def test_shapes_that_do_not_belong_together():
    stacked = jax.vmap(jfp8.quantize)(jnp.stack([X, 2 * X]))
    assert repr(stacked) == "ScaledArray(E4M3FN[2,2,2], scales f32[2], 0.01562 to 0.03125)"


def test_deleted_arrays():
    q = jfp8.quantize(X)
    q.data.delete()
    assert repr(q) == "ScaledArray(E4M3FN[2,2], scale 0.01562)"


def test_large_arrays_are_not_read():
    q = ScaledArray(jnp.zeros((1 << 20, 2), ml_dtypes.float8_e4m3fn), jnp.float32(1))
    assert repr(q) == "ScaledArray(E4M3FN[1048576,2], scale 1)"


NAMES = {
    **vars(jfp8.quantizers),
    **vars(recipes),
    **vars(jfp8.optim),
    **{fmt.name: fmt for fmt in (E2M1FN, E3M4, E4M3FN, E5M2)},
    "Hadamard": Hadamard,
    "RandomHadamard": RandomHadamard,
}


@pytest.mark.parametrize(
    "text",
    [
        "DelayedScaling(amax_history_len=32)",
        "RowwiseScaling(accumulation='hopper', fast_accumulation=())",
        "Hybrid(fused=('*/logits',))",
        "Current(E5M2, scale_rounding='power_of_two')",
        "Delayed(E5M2, rounding='toward_zero', margin=1, length=4)",
        "Rowwise(E4M3FN)",
        "TwoLevel(E2M1FN, rounding='stochastic', block_size=(16, 1), scale_fmt=E5M2)",
        "TwoLevel(E2M1FN, block_size=(16, 1), targets=(6.0, 4.0), reach=1536.0, outer='row')",
        "Hadamard()",
        "Blocks(transform='expand')",
        "Float(dtype='bfloat16')",
        "RandomHadamard(n=64)",
        "PerOperand(fprop=Product(lhs=Current(E4M3FN), rhs=Current(E4M3FN)), "
        "dgrad=Product(lhs=Current(E5M2), rhs=None), "
        "wgrad=Product(lhs=None, rhs=None))",
    ],
)
def test_repr_is_the_call_that_makes_it(text):
    assert repr(eval(text, dict(NAMES))) == text


def test_recipes_of_ones_own():
    @dataclasses.dataclass(frozen=True, repr=False)
    class Mine(RowwiseScaling):
        blocks: list = dataclasses.field(default_factory=list)

    assert repr(Mine()) == "Mine()"
    assert repr(Mine(blocks=[1], high_precision_wgrad=True)) == (
        "Mine(high_precision_wgrad=True, blocks=[1])"
    )


def test_errors_quote_what_can_be_typed():
    with pytest.raises(ValueError, match=re.escape("output=Rowwise(E4M3FN): ")) as error:
        Product(None, None, output=Rowwise(E4M3FN))
    assert "Format(" not in str(error.value)


TX = jfp8.loss_scale(optax.chain(optax.clip_by_global_norm(1.0), jfp8.optim.adamw(1e-3)))


def test_optimizer_states_print_no_walls():
    params = {"w": jnp.ones((64, 128))}
    assert repr(jax.jit(TX.init)(params)) == (
        "LossScaleState(loss_scale=32768, growth_tracker=0, grads_finite=True, overflow_count=0, "
        "inner_state=(StoredState(ScaleByAdamState): 8 arrays, 16.9 kB))"
    )
    adam = jax.jit(jfp8.optim.adam(1e-3).init)(params)
    assert repr(adam) == "StoredState(count=0, inner_state=(ScaleByAdamState: 7 arrays, 16.9 kB))"
    tx = jfp8.optim.master_weights(optax.sgd(0.1, momentum=0.9), "float32")
    masters = jax.jit(lambda params: tx.init(jax.tree.map(jfp8.quantize, params)))(params)
    assert repr(masters) == (
        "MasterWeightsState(count=0, masters=(1 array, 32.8 kB), "
        "inner_state=(TraceState: 1 array, 32.8 kB))"
    )
    rounding = jax.jit(jfp8.optim.stochastic_rounding(optax.sgd(0.1)).init)(params)
    assert repr(rounding) == "StochasticRoundingState(count=0, inner_state=(empty))"


def test_moments():
    half = HalfArray(jnp.zeros((2, 3), jnp.float16), jnp.float32(0.5))
    assert repr(half) == "HalfArray(f16[2,3], scale 0.5)"
    one = jnp.ones((2, 1), jnp.bfloat16)
    expanded = ExpandedArray(jnp.zeros((2, 3), ml_dtypes.float8_e4m3fn), one, one)
    assert repr(expanded) == "ExpandedArray(E4M3FN[2,3], amax bf16[2,1], power bf16[2,1])"


def test_dtypes_are_named_as_jax_does_and_formats_by_their_names():
    given = (jnp.int32, np.uint8, jnp.bfloat16, "float64", bool, E5M2.dtype)
    assert [dtype(jnp.dtype(x)) for x in given] == ["i32", "u8", "bf16", "f64", "bool", "E5M2"]


def test_a_number_is_whole_or_has_four_digits():
    given = (32768.0, 2.5e14, 1e15, 2 / 3, np.inf, True, np.int32(7))
    written = ["32768", "250000000000000", "1e+15", "0.6667", "inf", "True", "7"]
    assert [number(x) for x in given] == written
