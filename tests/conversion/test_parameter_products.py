"""Products that modules compute by themselves, against models written with jfp8's product."""

import functools
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax import lax

import jfp8
from jfp8.recipes.registry import get
from support.models import Model

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 6, 8))
NORMAL = nn.initializers.normal(0.3)


class Einsum(nn.Module):
    """The layer of Gemma and tunix; with a recipe, the same with jfp8's product."""

    shape: tuple[int, ...]
    recipe: str | None = None

    @nn.compact
    def __call__(self, equation, x):
        w = self.param("w", NORMAL, self.shape)
        if self.recipe is not None:
            return jfp8.linen.EinsumProduct(recipe=self.recipe)(equation, x, w)
        return jnp.einsum(equation, x, w)


class Block(nn.Module):
    """Attention and a feed-forward layer as Gemma has them, in small."""

    recipe: str | None = None

    @nn.compact
    def __call__(self, x, _=None):
        einsum = functools.partial(Einsum, recipe=self.recipe)
        q = einsum((2, 8, 4), name="q_einsum")("BTD,NDH->BTNH", x)
        k, v = einsum((2, 2, 8, 4), name="kv_einsum")("BSD,CKDH->CBSKH", x)
        weights = nn.softmax(jnp.einsum("BTNH,BSNH->BTNS", q, k))
        context = jnp.einsum("BTNS,BSNH->BTNH", weights, v)
        x = x + einsum((2, 4, 8), name="attn_vec_einsum")("BTNH,NHD->BTD", context)
        gate = einsum((8, 8), name="gating_einsum")("...F,FH->...H", x)
        return x + einsum((8, 8), name="linear")("...H,HF->...F", nn.gelu(gate)), None


class Gemma(nn.Module):
    """Blocks under remat in a scan, and an embedding that gives the logits as well."""

    recipe: str | None = None

    @nn.compact
    def __call__(self, tokens):
        table = self.param("input_embedding", NORMAL, (16, 8))
        collections = ("params", "fp8", "fp8_sink") if self.recipe else ("params",)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes=dict.fromkeys(collections, 0),
            split_rngs={"params": True},
            length=2,
        )
        x, _ = layers(self.recipe, name="layers")(table[tokens], None)
        return jnp.dot(x, table.T)


TOKENS = jnp.arange(12).reshape(2, 6)
PROJECTIONS = {
    f"layers/{name}" for name in ("q_einsum", "kv_einsum", "attn_vec_einsum", "gating_einsum")
} | {"layers/linear"}


def rows_of(model, *inputs):
    variables = jax.eval_shape(model.init, KEY, *inputs)
    return jfp8.report(model, variables, *inputs).rows


def fp8_products(model, *inputs):
    """How many there are of each kind."""
    found = Counter()
    for row in rows_of(model, *inputs):
        found[row.kind if row.fp8 else "plain"] += row.times
    return found


def leaves_of(fp8):
    """Histories by the module that has the product, and the tensor."""
    flat = flatten_dict(fp8)
    skip = ("DotGeneral_", "EinsumProduct_")
    return {tuple(k for k in path if not k.startswith(skip)): x for path, x in flat.items()}


def assert_same(found, expected):
    found, expected = leaves_of(found), leaves_of(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg="/".join(path))


def test_all_projections_of_a_gemma_and_nothing_else():
    rows = rows_of(jfp8.convert(Gemma(), "delayed"), TOKENS)
    assert {row.path for row in rows if row.fp8} == PROJECTIONS
    (logits,) = {row.reason for row in rows if row.path == "" and not row.fp8}
    assert logits == "exempt: a layer whose result the model returns: the final logits"
    for kind in ("dgrad", "wgrad"):  # of two blocks
        assert sum(row.times for row in rows if row.fp8 and row.kind == kind) == 10
    # State stands beside the parameter.
    converted = jfp8.convert(Gemma(), "delayed")
    stock, variables = (jax.eval_shape(m.init, KEY, TOKENS) for m in (Gemma(), converted))
    assert variables["params"] == stock["params"]
    assert sorted(variables["fp8"]["layers"]) == sorted(stock["params"]["layers"])
    product = variables["fp8"]["layers"]["q_einsum"]["DotGeneral_w"]
    assert product["lhs"]["amax_history"].shape == (2, 16)


weight = lambda module: module.param("w", NORMAL, (3, 8, 8))
WAYS = {
    "@": lambda x, w: x @ w[0],
    "dot": lambda x, w: jnp.dot(x, w[1].astype(jnp.bfloat16).astype(jnp.float32)),
    "matmul": lambda x, w: jnp.matmul(w[2].T, x.swapaxes(-1, -2)),
    "tensordot": lambda x, w: jnp.tensordot(x, jnp.reshape(w, (3 * 8, 8)), ((-1,), (1,))),
    "dot_general": lambda x, w: lax.dot_general(x, w[0], (((2,), (0,)), ((), ()))),
    "by index": lambda x, w: x @ lax.dynamic_index_in_dim(w, x.shape[0] // 2, keepdims=False),
    "jit": lambda x, w: jax.jit(lambda x, w: jnp.tanh(x) @ w)(x, w[0]),
    "closure": lambda x, w: jax.jit(lambda x: x @ w[0])(x),
    "vmap": lambda x, w: jax.vmap(lambda x: x @ w[0])(x),
    "frozen": lambda x, w: x @ lax.stop_gradient(w[0]),
    "batched": lambda x, w: jnp.einsum("btd,edf->ebtf", x, w),
    "side by side": lambda x, w: x @ jnp.concatenate([w[0], w[2]], axis=-1),
    "computed": lambda x, w: x @ jnp.tanh(2 * w[0]),
    "looked up": lambda x, w: jnp.einsum("td,bsd->bts", w[0][jnp.arange(6)], x),
}


def written(function):
    """A model of one function of an input and a parameter."""
    return Model(lambda module, x: function(x, weight(module)))


@pytest.mark.parametrize("lift", ["nn.vmap", "nn.jit"])
def test_lifted_layers(lift):
    split, axes = {"params": True}, {"params": 0}
    vmapped = functools.partial(nn.vmap, variable_axes=axes, split_rngs=split)
    lifted = {"nn.jit": nn.jit, "nn.vmap": vmapped}[lift](Model)
    model = Model(lambda module, x: lifted(lambda m, x: x @ weight(m)[0])(x))
    model = jfp8.convert(model, "delayed", exempt=())
    assert fp8_products(model, X)["fprop"] == 1
    (module,) = jax.eval_shape(model.init, KEY, X)["fp8"].values()
    leading = () if lift == "nn.jit" else (2,)
    assert module["DotGeneral_w"]["grad"]["amax"].shape == leading


class Heir(nn.Dense):
    """A class of the user with the call of Flax."""


def test_a_subclass_of_a_layer_is_that_layer():
    """Its product is not found once more, where the layer itself is exempt as the logits are."""
    model = jfp8.convert(nn.Sequential([nn.Dense(8), nn.relu, Heir(4)]), "current")
    assert fp8_products(model, X)["fprop"] == 1


def test_a_region():
    """Nothing is left behind in the model, nor in JAX."""
    model = written(WAYS["@"])
    variables = jax.eval_shape(model.init, KEY, X)
    with jfp8.autocast("current"):
        assert fp8_products(model, X)["fprop"] == 1
    with jfp8.autocast("current", enabled=False):
        assert fp8_products(model, X)["fprop"] == 0
    assert fp8_products(model, X)["fprop"] == 0
    with jfp8.autocast("delayed"):
        made = jax.eval_shape(model.init, KEY, X)
    assert made["params"] == variables["params"]
    assert sorted(made["fp8"]) == ["DotGeneral_w"]


def of_block(model, variables):
    loss = lambda variables: jnp.sum(model.apply(variables, X)[0] ** 2)
    return jax.jit(jax.value_and_grad(loss))(variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["current", "rowwise", "block", "mxfp8", "nvfp4", "direct_e5m2", "hybrid"]
)
def test_results_and_gradients_are_those_of_our_product_to_the_bit(recipe):
    params = {"params": jax.jit(Block().init)(KEY, X)["params"]}
    found = of_block(jfp8.convert(Block(), recipe, exempt=()), params)
    expected = of_block(Block(get(recipe)), params)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


def trained(model, steps=2):
    """The loss and the histories of each step."""
    variables = jax.jit(model.init)(KEY, TOKENS)
    create = jfp8.TrainState.create
    state = create(apply_fn=model.apply, variables=variables, tx=optax.adam(1e-2))

    @jax.jit
    def step(state):
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        loss_fn = lambda v, tokens: jnp.mean(cross_entropy(model.apply(v, tokens), tokens))
        loss, grads = jfp8.value_and_grad(loss_fn)(state, TOKENS)
        return state.apply_gradients(grads), loss

    for _ in range(steps):
        state, loss = step(state)
        yield loss, state.fp8


@pytest.mark.slow
def test_histories_are_those_of_our_product_to_the_bit():
    """Inside of remat and scan, with a first step that makes them and a second that uses them."""
    converted, written = jfp8.convert(Gemma(), "delayed"), Gemma(get("delayed"))
    for found, expected in zip(trained(converted), trained(written), strict=True):
        assert found[0] == expected[0]
        assert_same(found[1], expected[1])


BODY = lambda x, w: (jnp.tanh(x @ w), None)
LOOPS = {
    "checkpoint": lambda x, w: lax.scan(jax.checkpoint(BODY), x, w)[0],
    "while": lambda x, w: lax.fori_loop(0, 3, lambda i, x: BODY(x, w[i])[0], x),
    "cond": lambda x, w: lax.cond(x[0, 0, 0] > 1e9, jnp.sin, lambda x: BODY(x, w[0])[0], x),
}


@pytest.mark.parametrize(
    ("given", "said"),
    [(("fp8", "fp8_sink"), "but not to its sink"), ((), "without its 'fp8' collection")],
)
@pytest.mark.representative(1)
def test_histories_that_a_body_cannot_update_are_told(given, said):
    model = jfp8.convert(written(LOOPS["checkpoint"]), "delayed", exempt=())
    variables = model.init(KEY, X)
    state = {name: variables[name] for name in given}
    with pytest.warns(UserWarning, match=said):
        jax.grad(lambda p: jnp.sum(model.apply({"params": p, **state}, X)))(variables["params"])
