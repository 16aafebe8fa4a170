"""`convert_module` and `layers_of`: FP8 for NNX models that nobody edits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.nnx import Fp8State, convert_module, layers_of
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from support.arrays import normal

D = 16
RECIPE = DelayedScaling()
call = nnx.jit(lambda model, x: model(x))


def everything(path, layer):
    del path, layer
    return RECIPE


def loss_of(model, x):
    return (model(x) ** 2).mean()


def histories(model):
    flat = nnx.to_flat_state(nnx.state(model, Fp8State))
    found = {(*path[:-2], path[-1]): np.asarray(v.get_value()) for path, v in flat}
    return {path: history for path, history in found.items() if path[-1] != "check"}


class Block(nnx.Module):
    def __init__(self, rngs, package=nnx):
        self.up = package.Linear(D, 2 * D, rngs=rngs)
        self.down = package.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class EncoderLayer(nnx.Module):
    """Pre-norm, as in a hundred tutorials."""

    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(D, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(D, 4 * D, rngs=rngs), nnx.gelu, nnx.Linear(4 * D, D, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.mlp(self.norm2(x))


IN_A_LAYER = [f"attention/{name}" for name in ("query", "key", "value", "out")] + [
    "mlp/layers/0",
    "mlp/layers/2",
]


@pytest.mark.slow
def test_containers():
    class Model(nnx.Module):
        def __init__(self, rngs):
            make = lambda: nnx.Linear(D, D, rngs=rngs)
            self.z, self.plain = nnx.Dict(b=make()), nnx.data({"y": [make(), (make(),)]})
            self.shared, self.nothing = self.z["b"], None
            self.many = nnx.List([make() for _ in range(11)])

        def __call__(self, x):
            (first, (second,)) = self.plain["y"]
            return self.shared(self.many[10](second(first(self.z["b"](x)))))

    model, x = Model(nnx.Rngs(0)), normal((3, D))
    many = [f"many/{i}" for i in range(11)]  # 10 comes after 9
    paths = [*many, "plain/y/0", "plain/y/1/0", "shared"]
    assert [path for path, _ in layers_of(model)] == paths
    converted = convert_module(model, everything)
    assert converted.shared is converted.z["b"]
    assert converted.plain["y"][1][0].dot_general.path == "plain/y/1/0"
    assert layers_of(converted) == []
    y, reference = call(converted, x), call(model, x)
    assert 1e-3 < np.linalg.norm(y - reference) / np.linalg.norm(reference) < 0.15


def test_layers_that_are_none():
    """Those with another product, and those of jfp8 itself."""

    class Mine(nnx.Linear):
        pass

    rngs = nnx.Rngs(0)
    custom = functools.partial(jax.lax.dot_general)
    model = nnx.Dict(
        mine=Mine(1, 1, rngs=rngs),
        custom=nnx.Linear(1, 1, dot_general=custom, rngs=rngs),
        general=nnx.LinearGeneral(1, 1, dot_general_cls=lambda: custom, rngs=rngs),
        fp8=jfp8.nnx.Linear(1, 1, recipe=Float8CurrentScaling(), rngs=rngs),
        norm=nnx.LayerNorm(1, rngs=rngs),
        embed=nnx.Embed(1, 1, rngs=rngs),
    )
    assert [path for path, _ in layers_of(model)] == ["mine"]
    converted = convert_module(model, everything)
    assert isinstance(converted["mine"], Mine)
    assert isinstance(converted["mine"].dot_general, jfp8.nnx.DotGeneral)
    assert converted["custom"].dot_general is custom
    assert converted["fp8"].dot_general.recipe == Float8CurrentScaling()


@pytest.mark.slow
def test_it_is_the_hand_made_model_and_the_original_is_untouched():
    model, x = nnx.jit(lambda: Block(nnx.Rngs(0)))(), normal((4, D))
    reference = call(model, x)
    graphdef, state = nnx.split(model)
    arrays = [v.get_value() for _, v in nnx.to_flat_state(state)]
    variables = {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}

    converted = convert_module(model, everything)
    assert isinstance(converted, Block)
    kept = [v.get_value() for _, v in nnx.to_flat_state(nnx.state(converted, nnx.Param))]
    assert all(a is b for a, b in zip(arrays, kept, strict=True))  # nothing was copied
    step = nnx.jit(jfp8.nnx.value_and_grad(loss_of))
    by_hand = Block(nnx.Rngs(0), jfp8.nnx)
    (loss, grads), (wanted_loss, wanted) = step(converted, x), step(by_hand, x)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(
        close, (loss, grads, histories(converted)), (wanted_loss, wanted, histories(by_hand))
    )

    # Training the copy changes nothing of the original.
    optimizer = nnx.Optimizer(converted, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(converted, grads)
    assert nnx.graphdef(model) == graphdef
    after = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    assert {id(v) for v in after} == variables
    np.testing.assert_array_equal(call(model, x), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        lambda r: nnx.LinearGeneral((6, 4), (3, 2), axis=(-2, -1), rngs=r),
        lambda r: nnx.Conv(4, 6, (3,), strides=2, rngs=r),
        lambda r: nnx.ConvTranspose(4, 6, (3,), strides=2, rngs=r),
        lambda r: nnx.Einsum("nta,ab->ntb", (4, 5), (5,), rngs=r),
    ],
    ids=["LinearGeneral", "Conv", "ConvTranspose", "Einsum"],
)
def test_each_kind(layer):
    stock, x = layer(nnx.Rngs(0)), normal((2, 6, 4))
    ours = convert_module(stock, everything)
    assert isinstance(ours, type(stock))
    y, reference = call(ours, x), call(stock, x)
    assert 1e-3 < np.linalg.norm(y - reference) / np.linalg.norm(reference) < 0.06
    nnx.jit(nnx.grad(loss_of))(ours, x)
    (found,) = (history for path, history in histories(ours).items() if path[-1] == "lhs")
    assert found[0] == jnp.abs(x).max()
    assert layers_of(stock)
    assert not layers_of(ours)
    copy = nnx.clone(ours)
    np.testing.assert_allclose(call(copy, x), call(ours, x))


def test_products_inside_of_attention_are_opt_in():
    model, asked = EncoderLayer(nnx.Rngs(0)), []

    def decide(path, layer):
        asked.append((path, type(layer).__name__))
        return RECIPE

    convert_module(model, decide)
    assert sorted(path for path, _ in asked) == sorted(IN_A_LAYER)
    asked.clear()
    converted = convert_module(model, decide, attention=True)
    assert asked[0] == ("attention", "MultiHeadAttention")
    assert converted.attention.attention_fn.path == "attention/attention_fn"
    assert model.attention.attention_fn is nnx.dot_product_attention
    x = normal((2, 5, D))
    by_fp8, by_model = call(converted, x), call(convert_module(model, decide), x)
    assert 1e-3 < np.linalg.norm(by_fp8 - by_model) / np.linalg.norm(by_model) < 0.1
    refused = convert_module(
        model, lambda path, _: None if path == "attention" else RECIPE, attention=True
    )
    assert refused.attention.attention_fn is nnx.dot_product_attention


@pytest.mark.slow
def test_stacks_of_stacks():
    """Histories get the leading axes of the kernels, so that whatever lifts these lifts them."""
    make = nnx.vmap(nnx.vmap(lambda rngs: Block(rngs)))
    converted = convert_module(nnx.split_rngs(splits=(2, 3))(make)(nnx.Rngs(0)), everything)
    assert {h.shape for h in histories(converted).values()} == {(2, 3, 16)}
    x = normal((4, D))
    twice = nnx.vmap(nnx.vmap(lambda block, x: block(x), in_axes=(0, None)), in_axes=(0, None))
    nnx.jit(nnx.grad(lambda model, x: jnp.sum(twice(model, x) ** 2)))(converted, x)
    found = histories(converted)["up", "dot_general", "lhs"]
    np.testing.assert_array_equal(found[..., 0], np.full((2, 3), np.abs(x).max()))


own_derivative = jax.custom_jvp(jnp.dot)
own_derivative.defjvp(lambda xs, ts: (jnp.dot(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))


class Home(nnx.Module):
    """Multiplies where conversion does not look: in a function with a derivative of its own."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((D, D)))
        self.more = nnx.List([nnx.Param(rngs.params.normal((D, D))), nnx.Param(jnp.ones((1, D)))])

    def __call__(self, x):
        return own_derivative(own_derivative(x, self.w[...]), self.more[0][...]) * self.more[1][...]


class Mixed(nnx.Module):
    """A product of each kind that stays in high precision, for a reason of its own."""

    def __init__(self, rngs):
        self.up = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.own = nnx.Linear(D, D, dot_general=functools.partial(jax.lax.dot_general), rngs=rngs)
        self.home = Home(rngs)
        self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.transposed = nnx.ConvTranspose(D, D, (1,), rngs=rngs)
        self.ours = jfp8.nnx.Linear(D, D, recipe=Float8CurrentScaling(), rngs=rngs)
        self.head = nnx.Linear(D, 4, rngs=rngs)

    def __call__(self, x):
        x = self.home(self.own(self.up(x)))[None]
        return self.head(self.ours(self.transposed(self.attention(x))))


def test_a_report_has_a_reason_for_every_product():
    model, x = Mixed(nnx.Rngs(0)), normal((3, D))
    before = nnx.graphdef(model)
    converted = jfp8.convert(model, exempt=(*jfp8.EDGES, "transposed", "up"))
    r = jfp8.report(converted, x)
    by_path = {}
    for row in r.rows:
        by_path.setdefault((row.path, row.layer), set()).add(row.reason)
    raw = by_path.pop(("home", "Home"))
    assert all(reason.startswith("computed by no layer that can be conv") for reason in raw)
    assert all("test_nnx_convert.py:" in reason for reason in raw)
    attention = {
        (f"attention/{n}", "LinearGeneral"): {""} for n in ("query", "key", "value", "out")
    }
    assert by_path == {
        ("up", "Linear"): {"exempt: 'up'"},
        ("own", "Linear"): {"the layer was given its own dot_general"},
        ("attention", "MultiHeadAttention"): {"inside of attention (convert with attention=True)"},
        **attention,
        ("transposed", "ConvTranspose"): {"exempt: 'transposed'"},
        ("ours", "Linear"): {""},
        ("head", "Linear"): {"exempt: a layer whose result the model returns: the final logits"},
    }
    left = nnx.graphdef(converted)
    plain = {row.reason for row in jfp8.report(model, x).rows if row.path in ("up", "head")}
    assert plain == {"not converted"}
    assert (nnx.graphdef(model), nnx.graphdef(converted)) == (before, left)


def test_a_conversion_that_finds_nothing_to_wait_for_says_so_at_once():
    """Without layers whose edges are seen when it is called."""
    model = nnx.Dict(norm=nnx.LayerNorm(D, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="No product of Dict is FP8.*no layer of Flax") as caught:
        jfp8.convert(model)
    (warning,) = caught
    assert warning.filename == __file__


def test_a_conversion_of_nothing_says_what_it_saw():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Home(rngs) for _ in range(6)])
            self.norm, self.embed = nnx.LayerNorm(D, rngs=rngs), nnx.Embed(9, D, rngs=rngs)
            self.head = nnx.Linear(D, 4, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Model(nnx.Rngs(0))
    converted = jfp8.convert(model)
    with pytest.warns(UserWarning, match="No product of Model is FP8") as caught:
        converted(normal((3, D)))
    (warning,) = caught
    text = str(warning.message)
    assert warning.filename == __file__
    assert "Linear at 'head': exempt: a layer whose result the model returns" in text
    assert "Home at 'blocks/3', 'more/0' (16, 16), 'more/1' (1, 16), 'w' (16, 16); and" in text
    assert "jfp8.nnx.EinsumOp" in text
    assert "norm" not in text
    assert "embed" not in text
    jfp8.convert(model, exempt="head")  # the user's own choice
    jfp8.convert(model, exempt=())
    jfp8.convert(nnx.Sequential(jfp8.nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.relu))


def test_layers_stacked_along_another_axis_are_refused():
    make = nnx.vmap(lambda rngs: nnx.Linear(4, 5, use_bias=False, rngs=rngs), in_axes=0, out_axes=2)
    with pytest.raises(ValueError, match=r"\(4, 5, 3\).*leading axes"):
        convert_module(nnx.split_rngs(splits=3)(make)(nnx.Rngs(0)), everything)
