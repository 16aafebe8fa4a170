"""`check_program` against perturbed inputs, and planted mistakes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jfp8
from jfp8.quantizers import Blockwise
from jfp8.recipes import Product
from support.recorded import recorded

X = jax.random.normal(jax.random.key(0), (2, 8, 32))


class CausalConv(nn.Module):
    recipe: str

    @nn.compact
    def __call__(self, x):
        return jfp8.Conv(16, (3,), padding="CAUSAL", recipe=self.recipe)(x)


class Decoder(nn.Module):
    recipe: str

    @nn.compact
    def __call__(self, x):
        attend = jfp8.MultiHeadDotProductAttention(num_heads=2, recipe=self.recipe)
        return attend(x, mask=nn.make_causal_mask(x[..., 0]))


LAYERS = {
    "dense": lambda recipe: jfp8.Dense(16, recipe=recipe),
    "attention": Decoder,
    "moe": lambda recipe: jfp8.MoE(4, 32, 2, recipe=recipe),
    "conv": CausalConv,
}
DAILY = {("current", "dense"), ("delayed", "attention"), ("block", "conv")}
CASES = [
    pytest.param(r, layer, marks=[] if (r, layer) in DAILY else pytest.mark.slow)
    for r in ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")
    for layer in LAYERS
]


@pytest.mark.parametrize(("recipe", "layer"), CASES)
@pytest.mark.representative(1)
def test_the_program_says_what_perturbed_inputs_say(recipe, layer):
    model = LAYERS[layer](recipe)
    variables = model.init(jax.random.key(1), X)
    variables.pop("fp8_sink", None)
    if "fp8" in variables:  # a step, after which histories have entries
        variables = {**variables, "fp8": jfp8.advance(recorded(model, variables, X)["fp8"])}
    f = lambda x: model.apply(variables, x)
    check, moved = jfp8.debug.check_program(f, X), jfp8.debug.looks_ahead(f, X)
    assert check.report.fp8_fraction > 0
    assert not check.unknown
    assert (check.is_causal, check.is_batch_invariant) == (
        moved.is_causal,
        moved.is_batch_invariant,
    )
    kind = "dense" if layer == "attention" else layer  # its projections
    has_history = "fp8" in variables
    assert check.is_causal == jfp8.recipes.get(recipe).is_causal(kind, history=has_history)


def by_sequence(w, x):
    return jax.lax.map(lambda sequence: sequence @ w, x)


def by_position(w, x):
    return jax.lax.map(lambda position: position @ w, x.swapaxes(0, 1)).swapaxes(0, 1)


def by_heads(w, x):
    """Of one sequence at a time."""
    return jnp.stack([sequence.reshape(8, 2, 16) @ w[:16] for sequence in x])


@pytest.mark.parametrize("program", [by_sequence, by_position, by_heads])
def test_loops_keep_sequences_and_positions_apart(program):
    f = jfp8.convert(program, "current", exempt=())
    check = jfp8.debug.check_program(f, jnp.eye(32, dtype=jnp.bfloat16), X)
    assert not check.unknown
    assert {row.kind for row in check.report.rows} == {"fprop", "dgrad", "wgrad"}
    mixed = not check.is_causal, not check.is_batch_invariant
    assert mixed == (program is not by_position, program is by_position)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jfp8.Dense(32, recipe="current")(x), None


def test_stacked_layers_of_linen():
    """Flax takes the constant part of what is quantized out of a scan over layers."""
    layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    variables = layers.init(jax.random.key(1), X)
    check = jfp8.debug.check_program(lambda x: layers.apply(variables, x)[0], X)
    assert check.later == check.others == ("Dense_0",)
    assert not check.unknown


def test_embedded_tokens_keep_sequences_and_positions_apart():
    """Gradients are with respect to the weights, not to counters beside them."""
    f = lambda params, tokens: params["w"][tokens] @ params["w"]
    params = {"step": jnp.int32(0), "w": jnp.eye(32)}
    for recipe in ("rowwise", "current"):
        converted = jfp8.convert(f, recipe, exempt=())
        check = jfp8.debug.check_program(converted, params, jnp.ones((2, 8), jnp.int32))
        assert {row.kind for row in check.report.rows} == {"fprop", "dgrad", "wgrad"}
        assert not check.unknown
        assert check.is_causal == check.is_batch_invariant == (recipe == "rowwise")


def test_rounded_values_keep_their_axes():
    rounded = lambda w, x: jax.lax.reduce_precision(x, 8, 7) @ w
    check = jfp8.debug.check_program(jfp8.convert(rounded, "rowwise", exempt=()), jnp.eye(32), X)
    assert check.is_causal
    assert check.is_batch_invariant


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x[jnp.array([1, 0, 1])],
        lambda x: x[:, jnp.array([[3, 1], [2, 2]])].reshape(2, 4, 32),
        lambda x: jnp.take_along_axis(x, jnp.array([[[3]], [[1]]]), axis=1),
        lambda x: x[jnp.argsort(x[:, 0, 0])],
    ],
)
def test_picked_rows_belong_to_their_batch(pick):
    f = lambda w, x: pick(x) @ w
    for recipe in ("rowwise", "current"):
        converted = jfp8.convert(f, recipe, exempt=())
        check = jfp8.debug.check_program(converted, jnp.eye(32), X)
        assert not check.unknown
        assert check.others == (() if recipe == "rowwise" else ("w",))


def carried(w, x):
    """Multiply what a recurrent layer carries, which begins as zeros."""
    return jax.lax.scan(lambda h, x: (h + x, h @ w), jnp.zeros((2, 32)), x.swapaxes(0, 1))[1]


def dispatched(w, x):
    """Give rows to experts by a one-hot matrix."""
    rows = x.reshape(16, 32)
    return jnp.einsum("ne,nd->ed", jax.nn.one_hot(jnp.argmax(rows[:, :4], -1), 4), rows) @ w


ZEROS = jnp.zeros_like(X)
JOINED = [
    lambda w, x: jnp.concatenate([ZEROS[:, :1], x], axis=1) @ w,  # a class token
    lambda w, x: jnp.roll(x, 1, axis=1) @ w,
    lambda w, x: jax.lax.dynamic_update_slice(jnp.zeros((2, 16, 32)), x, (0, 3, 0)) @ w,
    lambda w, x: jnp.stack([x[:, t] for t in range(8)], axis=1) @ w,  # an unrolled loop
    lambda w, x: jnp.concatenate([x[:1], x[1:]]) @ w,
    lambda w, x: jax.lax.sort((ZEROS, x))[1] @ w,
    lambda w, x: jax.lax.cond(w[0, 0] > 0, lambda x: x, lambda x: ZEROS, x) @ w,
    lambda w, x: jax.lax.fori_loop(0, 3, lambda i, h: h @ w + x, ZEROS),
    lambda w, x: nn.avg_pool(x, (2,), (2,)) @ w,
    lambda w, x: jnp.eye(8)[::2] @ x @ w,  # every other position
    dispatched,
    carried,
]


@pytest.mark.parametrize("f", JOINED)
def test_what_is_joined_with_an_input_has_its_batch(f):
    check = jfp8.debug.check_program(jfp8.convert(f, "current", exempt=()), jnp.eye(32), X)
    assert not check.unknown
    assert check.others == ("w",)
    assert check.later == (() if f is carried else ("w",))
    assert jfp8.debug.check_program(jfp8.convert(f, "rowwise", exempt=()), jnp.eye(32), X).is_causal


def test_elements_of_two_axes_are_not_followed():
    """Rows have scales of their own all the same, and blocks of rows may not."""
    f = lambda w, x: x[jnp.arange(4) % 2, jnp.arange(4)] @ w
    blocks, rows = (Blockwise(jfp8.E4M3FN, (32, n)) for n in (2, 1))
    for quantizer, unknown in ((blocks, ("w",)), (rows, ())):
        recipe = jfp8.recipes.PerOperand(Product(quantizer, rows), "mxfp8", "mxfp8")
        check = jfp8.debug.check_program(jfp8.convert(f, recipe, exempt=()), jnp.eye(32), X)
        assert check.report.fp8_fraction > 0
        assert (check.unknown, check.others) == (unknown, ())


def test_axes_of_class_tokens_and_pooled_rows_are_known():
    token = lambda w, x: jnp.concatenate([ZEROS[:, :1], x[:, 1:]], axis=1) @ w
    blocks, rows = (Blockwise(jfp8.E4M3FN, (32, n)) for n in (2, 1))
    recipe = jfp8.recipes.PerOperand(Product(blocks, rows), "mxfp8", "mxfp8")
    check = jfp8.debug.check_program(jfp8.convert(token, recipe, exempt=()), jnp.eye(32), X)
    assert (check.unknown, check.later, check.others) == ((), ("w",), ())
    pooled = lambda w, x: jnp.einsum("t,btd->bd", jnp.ones(8), x) @ w
    check = jfp8.debug.check_program(jfp8.convert(pooled, "current", exempt=()), jnp.eye(32), X)
    assert (check.unknown, check.later, check.others) == ((), (), ("w",))


def test_normalizing_by_the_largest_element_looks_at_all():
    normalized = lambda w, x: (x / jnp.max(jnp.abs(x))) @ w
    check = jfp8.debug.check_program(jfp8.convert(normalized, "rowwise", exempt=()), jnp.eye(32), X)
    assert check.later == check.others == ("w",)


def test_a_convolution_keeps_sequences_and_positions_apart():
    def f(params, x):
        numbers = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(x, params["k"], (1,), "SAME", dimension_numbers=numbers)
        return y @ params["w"]

    params = {"k": jnp.ones((3, 32, 16)), "w": jnp.eye(16)}
    for recipe, shared in (("rowwise", ()), ("current", ("w",))):
        converted = jfp8.convert(f, {"w": recipe, "k": None}, exempt=())
        check = jfp8.debug.check_program(converted, params, X)
        assert check.report.fp8_fraction > 0
        assert check.later == check.others == shared


def qkv(params, x):
    """Three products of one input, an f32 one that nobody asked for, and a product by itself."""
    q, k, v = (x @ params[name] for name in "qkv")
    scores = jnp.einsum("btd,bsd->bts", q, k) + jnp.tril(jnp.ones((1, 8, 8))) * 1e9
    return jnp.sum(jnp.tanh(jax.nn.softmax(scores) @ v) @ params["out"])


PARAMS = {name: jax.random.normal(jax.random.key(i), (32, 32)) / 6 for i, name in enumerate("qkv")}
PARAMS["out"] = PARAMS["q"] + 1


def test_planted_mistakes_are_found_by_name():
    rowwise = jfp8.convert(qkv, "rowwise", exempt=())
    check = jfp8.debug.check_program(rowwise, PARAMS, X)
    assert check.is_causal
    assert {len(each.paths): each.times for each in check.quantized_twice} == {3: 3}
    (shared,) = check.quantized_twice
    assert shared.paths == ("q", "k", "v")
    assert shared.casts == ("f32", "e4m3fn")
    assert {row.reason[:20] for row in check.report.unconverted} == {"computed by no layer"}
    assert "q, k, v: f32 -> e4m3fn, quantized 3 times." in str(check)

    planted = jfp8.convert(qkv, {"out": "current", "v": None, "*": "rowwise"}, exempt=())
    check = jfp8.debug.check_program(planted, PARAMS, X)
    assert check.later == check.others == ("out",)
    assert "v" in {row.path for row in check.report.unconverted}

    rounded = lambda params, x: qkv(params, jfp8.quantize(x, jfp8.E4M3FN).dequantize())
    check = jfp8.debug.check_program(jfp8.convert(rounded, "rowwise", exempt=()), PARAMS, X)
    (twice,) = (each for each in check.tensors if each.was_fp8)
    assert twice.paths == ("q", "k", "v")


def test_a_wrong_axis_is_told():
    with pytest.raises(ValueError, match=r"argument 1, which has \[\(32,\)\], has an axis 1"):
        jfp8.debug.check_program(lambda w, x: x @ w, jnp.ones((32, 4)), jnp.ones(32))
    for axis in (0, -1):  # the batch, or counted from the end
        with pytest.raises(ValueError, match=f"has an axis {axis} of positions. Set inputs= or"):
            jfp8.debug.check_program(lambda x: x @ x.mT, X, sequence_axis=axis)


def test_inputs_may_be_another_argument_and_have_no_positions():
    f = lambda x, w: jnp.sum(jnp.tanh(x @ w))
    converted = jfp8.convert(f, "current", weights=1, exempt=())
    for sequence_axis, later in ((1, ("w",)), (None, ())):
        how = {"inputs": 0, "sequence_axis": sequence_axis}
        check = jfp8.debug.check_program(converted, X, jnp.eye(32), **how)
        assert (check.later, check.others) == (later, ("w",))
