"""Products that NNX modules compute by themselves, against models written with jfp8's product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import relative_error
from support.recorded import record

X = jax.random.normal(jax.random.key(1), (2, 6, 8))
TOKENS = jnp.arange(12).reshape(2, 6)


def normal(rngs, shape, scale=0.3):
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape))


class Einsum(nnx.Module):
    """The layer of tunix; with a recipe, the same with jfp8's product."""

    def __init__(self, equation, shape, rngs, recipe=None):
        self.equation, self.w = equation, normal(rngs, shape)
        if recipe is not None:
            self.op = jfp8.nnx.EinsumOp(recipe=recipe)

    def __call__(self, x):
        return getattr(self, "op", jnp.einsum)(self.equation, x, self.w[...])


class Block(nnx.Module):
    """Attention and a feed-forward layer as tunix's Gemma has them, in small and under remat."""

    def __init__(self, rngs, recipe=None):
        einsum = functools.partial(Einsum, rngs=rngs, recipe=recipe)
        self.q_einsum = einsum("BTD,NDH->BTNH", (2, 8, 4))
        self.kv_einsum = einsum("BSD,CKDH->CBSKH", (2, 2, 8, 4))
        self.attn_vec_einsum = einsum("BTNH,NHD->BTD", (2, 4, 8))
        hook = {"dot_general": jfp8.nnx.DotGeneral(recipe=recipe)} if recipe else {}
        self.mlp = nnx.Linear(8, 8, rngs=rngs, **hook)
        self.calls = nnx.Variable(jnp.zeros((), int))

    def block(self, x):
        self.calls[...] += 1
        q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        weights = nnx.softmax(jnp.einsum("BTNH,BSNH->BTNS", q, k))
        x = x + self.attn_vec_einsum(jnp.einsum("BTNS,BSNH->BTNH", weights, v))
        return x + self.mlp(nnx.gelu(x))

    def __call__(self, x):
        return nnx.remat(self.block.__func__)(self, x)


class Gemma(nnx.Module):
    """Blocks, and an embedding that gives the logits as well."""

    def __init__(self, rngs, recipe=None):
        self.input_embedding = normal(rngs, (16, 8))
        self.layers = nnx.List([Block(rngs, recipe) for _ in range(2)])

    def __call__(self, tokens):
        x = self.input_embedding[...][tokens]
        for layer in self.layers:
            x = layer(x)
        return jnp.dot(x, self.input_embedding[...].T)


def fp8_paths(model, *inputs):
    return {row.path for row in jfp8.report(model, *inputs).rows if row.fp8}


def histories(model):
    """By the path of the layer and the tensor, without the name of the product."""
    found = nnx.to_flat_state(nnx.state(model, jfp8.nnx.Fp8State))
    return {
        tuple(k for k in path if k not in ("op", "dot_general", "DotGeneral_w")): variable[...]
        for path, variable in found
        if np.any(variable[...]) and path[-1] != "check"
    }


def trained(model, value_and_grad, steps=2):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        loss_fn = lambda model: jnp.mean(cross_entropy(model(TOKENS), TOKENS))
        loss, grads = value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for _ in range(steps):
        yield step(model, optimizer), histories(model)


def test_all_projections_of_a_gemma_and_nothing_else():
    model = Gemma(nnx.Rngs(0))
    converted = jfp8.convert(model, "delayed")
    rows = jfp8.report(converted, TOKENS).rows
    names = ("q_einsum", "kv_einsum", "attn_vec_einsum", "mlp")
    expected = {f"layers/{i}/{name}" for i in range(2) for name in names}
    assert {row.path for row in rows if row.fp8} == expected
    (logits,) = {row.reason for row in rows if row.path == "" and not row.fp8}
    assert logits == "exempt: a layer whose result the model returns: the final logits"
    for kind in ("dgrad", "wgrad"):  # of two blocks
        assert sum(row.times for row in rows if row.fp8 and row.kind == kind) == 8
    stock = nnx.state(model, nnx.Param)
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(converted, nnx.Param), stock))
    assert type(converted).__name__ == "Gemma"
    assert isinstance(converted, Gemma)
    assert converted.layers[0].q_einsum.DotGeneral_w.fp8["lhs"].shape == (16,)
    assert not hasattr(model.layers[0].q_einsum, "DotGeneral_w")


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False])
def test_loss_and_histories_are_those_of_our_product_to_the_bit(ours):
    """With ``jfp8.nnx.value_and_grad`` and with Flax's, and with a first step and a second."""
    value_and_grad = jfp8.nnx.value_and_grad if ours else nnx.value_and_grad
    converted = jfp8.convert(Gemma(nnx.Rngs(0)), "delayed")
    written = Gemma(nnx.Rngs(0), recipe="delayed")
    steps = zip(trained(converted, value_and_grad), trained(written, value_and_grad), strict=True)
    for found, expected in steps:
        assert found[0] == expected[0]
        assert found[1].keys() == expected[1].keys()
        assert len(found[1]) == 8 * (3 if ours else 2)
        for path, history in expected[1].items():
            np.testing.assert_array_equal(found[1][path], history, err_msg=str(path))
    assert converted.layers[0].calls[...] == 2  # once a step, as of the model itself


class Ways(nnx.Module):
    """One product; `way` says how it is written."""

    def __init__(self, way):
        self.way, self.w = way, normal(nnx.Rngs(0), (3, 8, 8))
        self.held = nnx.List([normal(nnx.Rngs(1), (8, 8))])
        if way == "of a layer":
            self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(2))
        if way in ("of a child", "nnx.jit", "in nnx.jit", "in nnx.remat"):
            self.child = Einsum("btd,df->btf", (8, 8), nnx.Rngs(2))
        if way == "normalized":
            self.g = nnx.Param(jnp.linspace(1, 2, 8))

    def __call__(self, x):
        return WAYS[self.way](self, x)

    def multiplied(self, x):
        return x @ self.w[0]


WAYS = {
    "value": lambda m, x: x @ m.w.get_value()[0],
    "of a list": lambda m, x: x @ m.held[0][...],
    "the variable": lambda m, x: jnp.einsum("btd,edf->ebtf", x, m.w),
    "of a child": lambda m, x: x @ m.child.w[...].astype(jnp.bfloat16).astype(jnp.float32),
    "nnx.jit": lambda m, x: nnx.jit(lambda child, x: child(x))(m.child, x),
    "in nnx.jit": lambda m, x: nnx.jit(lambda m, x: x @ m.w[...])(m.child, x),
    "of a layer": lambda m, x: x @ (m.layer.kernel[...] * jnp.tri(8)),
    "normalized": lambda m, x: x @ (m.w[1] / jnp.sum(m.w[1] ** 2, 0)[None] ** 0.5 * m.g[None]),
    "in a loop": lambda m, x: jax.lax.scan(lambda x, w: (x @ w, None), x, m.w[...])[0],
    "in nnx.remat": lambda m, x: nnx.remat(lambda child, x: child(x))(m.child, x),
    "a method": lambda m, x: m.multiplied(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.representative(2)
def test_however_it_is_written(way):
    model = Ways(way)
    converted = jfp8.convert(model, "delayed", exempt=())
    assert all(row.fp8 for row in jfp8.report(converted, X).rows)
    assert 1e-3 < relative_error(converted(X), model(X)) < 0.1  # eager
    jax.tree.map(np.testing.assert_array_equal, nnx.jit(lambda m: m(X))(converted), converted(X))
    assert not histories(converted)
    record(converted, X)
    assert len(histories(converted)) == 2  # of lhs and rhs


@pytest.mark.parametrize("inside", [True, False])
def test_stacks_are_converted_inside_or_as_a_whole(inside):
    """As a whole, nothing tells that a module is stacked: all share one history."""

    class Stack(nnx.Module):
        def __init__(self, make):
            self.layers = nnx.vmap(make)(jax.random.split(jax.random.key(0), 16))

        def __call__(self, x):
            scan = nnx.scan(lambda x, f: jnp.tanh(f(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return scan(x, self.layers)

    make = lambda key: Einsum("btd,df->btf", (8, 8), nnx.Rngs(key))
    convert = functools.partial(jfp8.convert, recipe="delayed", exempt=())
    stack = Stack(lambda key: convert(make(key))) if inside else convert(Stack(make))
    jfp8.nnx.value_and_grad(lambda m: jnp.sum(m(X)))(stack)
    history = stack.layers.DotGeneral_w.fp8["rhs"][...]
    largest = jnp.abs(stack.layers.w[...]).max((1, 2))
    # A sink adds up the amaxes of several uses, to 3 bits.
    rtol = 1e-6 if inside else 2**-4
    np.testing.assert_allclose(history[..., 0], largest if inside else largest.max(), rtol=rtol)
    by_example = jfp8.convert(Stack(make), "delayed", X, exempt=())
    assert by_example.layers.DotGeneral_w.fp8["rhs"].shape == (16, 16)


class Norm(nnx.RMSNorm):
    """A user's own: its vector is a matrix where layers are stacked."""


class Mixed(nnx.Module):
    """A module of the user's own with a layer of Flax."""

    def __init__(self, rngs, recipe=None):
        self.norm, self.own = Norm(8, rngs=rngs), Einsum("btd,df->btf", (8, 8), rngs, recipe)
        hook = {"dot_general": jfp8.nnx.DotGeneral(recipe=recipe)} if recipe else {}
        self.linear = nnx.Linear(8, 8, rngs=rngs, **hook)

    def __call__(self, x):
        return x + self.linear(nnx.gelu(self.own(self.norm(x))))


class Scanned(nnx.Module):
    """The structure of a language model, with layers that `nnx.vmap` stacks."""

    def __init__(self, rngs, recipe=None, layers=3):
        make = nnx.vmap(lambda rngs: Mixed(rngs, recipe))
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.split_rngs(splits=layers)(make)(rngs)
        self.norm, self.head = Norm(8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens):
        run = lambda x, layer: layer(x)
        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            self.embed(tokens), self.layers
        )
        return self.head(self.norm(x))


@pytest.mark.parametrize("layers", [3, 8])
@pytest.mark.representative(1)
def test_own_modules_in_a_stack_with_layers_of_flax(layers):
    """That a module is stacked shows in the kernels; 8 is the number of features too."""
    loss = lambda model, tokens: jnp.mean(model(tokens) ** 2)
    step = nnx.jit(jfp8.nnx.value_and_grad(loss))
    converted = jfp8.convert(Scanned(nnx.Rngs(0), layers=layers), "delayed")
    written = Scanned(nnx.Rngs(0), "delayed", layers=layers)
    for _ in range(2):
        (value, grads), (wanted, expected) = step(converted, TOKENS), step(written, TOKENS)
        assert value == wanted
    assert value != loss(Scanned(nnx.Rngs(0), layers=layers), TOKENS)
    own, op = converted.layers.own.DotGeneral_w.fp8, written.layers.own.op.fp8
    for role in ("lhs", "rhs", "grad"):
        assert np.all(own[role][:, :2])
        np.testing.assert_array_equal(own[role][...], op[role][...])
    np.testing.assert_array_equal(grads.layers.norm.scale[...], expected.layers.norm.scale[...])
    assert not hasattr(converted.layers.norm, "DotGeneral_scale")


def test_a_matrix_beside_a_stack_is_no_stack():
    """It has as many rows as there are layers."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = (Einsum("btd,df->btf", (8, 8), rngs) for _ in range(2))
            self.layers = nnx.split_rngs(splits=8)(nnx.vmap(lambda rngs: Mixed(rngs)))(rngs)
            self.position = normal(rngs, (1, 6, 8))

        def __call__(self, x):
            x = self.first(x + self.position)
            scan = nnx.scan(lambda x, f: f(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return jnp.tanh(self.second(scan(x, self.layers)))

    converted = jfp8.convert(Model(nnx.Rngs(0)), "delayed", exempt=())
    assert {"first", "second", "layers/own"} <= set(fp8_paths(converted, X))
    assert converted.first.DotGeneral_w.fp8["lhs"].shape == (16,)


def test_adapters_stay_and_are_not_cut_off():
    """Qwix adds them to ``jax.lax.dot_general``, which a layer must go on calling."""

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(8, 8, rngs=rngs)
            self.layer.kernel_lora_a = nnx.LoRAParam(jnp.ones((8, 1)))
            self.layer.kernel_lora_b = nnx.LoRAParam(jnp.ones((1, 8)))

        def __call__(self, x):
            low_rank = x @ self.layer.kernel_lora_a @ self.layer.kernel_lora_b
            return jnp.tanh(self.layer(x) + low_rank)

    converted = jfp8.convert(Adapted(nnx.Rngs(0)), "delayed")
    rows = [row for row in jfp8.report(converted, X).rows if row.kind in ("fprop", "forward")]
    assert [row.fp8 for row in rows] == [False, False, True]
    assert {row.reason for row in rows[:2]} == {f"exempt: {jfp8.Edge.LOW_RANK.value}"}
    nnx.grad(lambda m: jnp.sum(m(X)))(converted)
    assert len(histories(converted)) == 2
    expected = converted(X)
    nnx.update(converted, jfp8.quantize_params(nnx.state(converted, nnx.Param)))
    np.testing.assert_allclose(converted(X), expected, rtol=1e-5)  # the same codes
