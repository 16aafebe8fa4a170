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
def test_many_layers_are_in_the_order_of_numbers():
    """Not in that of their names, where 10 comes before 2."""
    model = nnx.Sequential(*[nnx.Linear(1, 1, rngs=nnx.Rngs(0)) for _ in range(12)])
    wanted = [f"layers/{i}" for i in range(12)]
    assert [path for path, _ in layers_of(model)] == wanted
    assert [path for path, _ in layers_of(nnx.clone(model))] == wanted


@pytest.mark.slow
def test_containers():
    class Model(nnx.Module):
        def __init__(self, rngs):
            make = lambda: nnx.Linear(D, D, rngs=rngs)
            self.z = nnx.Dict(b=make(), a=make())
            self.plain = nnx.data({"y": [make(), (make(),)], "x": make()})
            self.shared = self.z["b"]
            self.nothing = None

        def __call__(self, x):
            (first, (second,)), third = self.plain["y"], self.plain["x"]
            return self.shared(third(second(first(self.z["a"](self.z["b"](x))))))

    model, x = Model(nnx.Rngs(0)), normal((3, D))
    paths = ["plain/x", "plain/y/0", "plain/y/1/0", "shared", "z/a"]
    assert [path for path, _ in layers_of(model)] == paths
    converted = convert_module(model, everything)
    assert converted.shared is converted.z["b"]
    assert converted.plain["y"][1][0].dot_general.path == "plain/y/1/0"
    assert layers_of(converted) == []
    assert len(layers_of(model)) == 5
    converted.eval()
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
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, wanted)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    a, b = histories(converted), histories(by_hand)
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-5)
        assert a[key][0] > 0

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


class Scanned(nnx.Module):
    """Layers in one array, scanned over: Flax's own example of it."""

    def __init__(self, rngs, layers=3):
        make = nnx.vmap(lambda rngs: nnx.Linear(D, D, use_bias=False, rngs=rngs))
        self.layers = nnx.split_rngs(splits=layers)(make)(rngs)

    def __call__(self, x):
        body = nnx.scan(
            lambda x, layer: nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return body(x, self.layers)


def test_a_stack_of_layers_is_no_edge_of_a_model():
    """Against the same model unrolled in f32; errors of at most 2^-4 of each operand add up."""
    model, x = Scanned(nnx.Rngs(0)), normal((4, D))
    weights = model.layers.kernel.get_value()

    def unrolled(weights, x):
        seen = []
        for w in weights:
            seen.append(jnp.abs(x).max())
            x = jnp.tanh(x @ w)
        return (x**2).mean(), jnp.stack(seen)

    (wanted, amaxes), gradients = jax.jit(jax.value_and_grad(unrolled, has_aux=True))(weights, x)
    converted = jfp8.convert(model)
    step = nnx.jit(jfp8.nnx.value_and_grad(loss_of))
    loss, grads = step(converted, x)
    assert float(loss) == pytest.approx(float(wanted), rel=0.1)
    error = grads.layers.kernel.get_value() - gradients
    norm = lambda a: np.sqrt(np.sum(np.square(a), axis=(1, 2)))
    assert np.all(norm(error) > 1e-3 * norm(gradients))  # each of the three in FP8
    assert np.all(norm(error) < 0.15 * norm(gradients))
    found = histories(converted)
    np.testing.assert_array_equal(
        found["layers", "dot_general", "rhs"][:, 0], jnp.abs(weights).max((1, 2))
    )
    np.testing.assert_allclose(found["layers", "dot_general", "lhs"][:, 0], amaxes, rtol=0.1)
    assert found["layers", "dot_general", "lhs"][0, 0] == amaxes[0]
    rows = jfp8.report(converted, x).rows
    assert [(row.path, row.fp8, row.times) for row in rows] == [("layers", True, 3)] * 3


def test_a_stack_of_convolutions_takes_no_images():
    make = nnx.vmap(lambda rngs: nnx.Conv(3, 3, (3,), rngs=rngs))
    model = nnx.Dict(layers=nnx.split_rngs(splits=2)(make)(nnx.Rngs(0)))
    assert isinstance(
        jfp8.convert(model)["layers"].conv_general_dilated, jfp8.nnx.ConvGeneralDilated
    )


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


def test_layers_keep_their_own_promotion_and_dtypes():
    seen = []

    def promote(args, *, dtype=None):
        seen.append(len(args))
        return tuple(None if a is None else jnp.asarray(a, jnp.bfloat16) for a in args)

    model = nnx.Linear(D, D, promote_dtype=promote, rngs=nnx.Rngs(0))
    converted = convert_module(model, everything)
    assert converted(normal((2, D))).dtype == jnp.bfloat16
    assert seen == [3]
    twice = (nnx.graphdef(convert_module(model, everything)) for _ in range(2))
    assert len(set(twice)) == 1  # equal, so compiled once


class Matrix(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((D, D)))
        self.up = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return self.up(x) @ self.w


@pytest.mark.parametrize("place", ["w", "up"])
def test_a_converted_model_does_not_keep_its_recipe_silently(place):
    """A Linen model takes the new one."""
    model = Matrix(nnx.Rngs(0))
    converted = jfp8.convert(model, "delayed", only=place)
    with pytest.raises(ValueError, match=rf"'{place}' has the recipe 'delayed'.*\(original, 'mxf"):
        jfp8.convert(converted, "mxfp8", exempt=())
    jfp8.convert(converted, "delayed", exempt=())
    jfp8.convert(converted, "mxfp8", only={"up": "w", "w": "up"}[place])
    ours = nnx.Sequential(jfp8.nnx.Linear(D, D, recipe="delayed", rngs=nnx.Rngs(0)))
    jfp8.convert(ours, "mxfp8", exempt=())  # was given its recipe by hand
