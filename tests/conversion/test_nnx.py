"""Converted NNX models: copies whose calls change what calls of the original change."""

import copy
import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.nnx import Fp8State
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from support.arrays import relative_error
from support.recorded import histories, record

D = 16
X = jax.random.normal(jax.random.key(0), (4, D))
RECIPE = DelayedScaling()
LOGITS = "exempt: a layer whose result the model returns: the final logits"
call = nnx.jit(lambda model, x: model(x))


def parameter(rngs, shape):
    return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))


def moved(model):
    """The paths of products that have recorded something."""
    return {path[:-1] for path, history in histories(model).items() if history.any()}


class Net(nnx.Module):
    """Statistics, random numbers, a cache that a call makes, and a counter that is static."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(D, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head, self.calls = nnx.Linear(D, 4, rngs=rngs), 0

    def __call__(self, x):
        self.calls += 1
        self.last = nnx.Cache(self.features(x))
        return self.head(self.last[...])

    def features(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))

    def until(self, x):
        while jnp.linalg.norm(x) > 1e-3:  # No trace can follow this.
            x = self.down(x) / 4
        return x

    def widened(self, rngs):
        self.more = nnx.Linear(4, 4, rngs=rngs)
        return self


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


def data_of(model):
    """All that a call may change: everything but parameters and histories."""
    rest = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, Fp8State, nnx.RngKey)))
    return {path: v.get_raw_value() for path, v in nnx.to_flat_state(rest)}


def test_a_call_changes_what_the_model_changes():
    """With a recipe that stays in high precision, so that values are equal."""
    never = lambda path, layer: False
    plain, ours = Net(nnx.Rngs(0)), jfp8.convert(Net(nnx.Rngs(0)), only=never)
    for train in (True, False, True):
        for model in (plain, ours):
            model.train() if train else model.eval()
        np.testing.assert_array_equal(ours(X), plain(X))
        np.testing.assert_array_equal(ours.features(X), plain.features(X))  # changes only values
        for path, value in data_of(plain).items():
            np.testing.assert_array_equal(data_of(ours)[path], value)
    assert ours.calls == plain.calls == 3
    assert data_of(ours).keys() == data_of(plain).keys()
    assert ours.widened(nnx.Rngs(1)) is ours
    assert ours.more(X[:, :4]).shape == (4, 4)
    fp8 = jfp8.convert(plain, "current", exempt=())
    assert 0 < relative_error(fp8.until(X), plain.until(X)) < 0.3


def test_training_with_evaluation_between_steps():
    """Histories move where a gradient is taken, and the model draws the same random numbers."""
    plain, ours = Net(nnx.Rngs(0)), jfp8.convert(Net(nnx.Rngs(0)), "delayed")
    optimizer = jfp8.nnx.Optimizer(ours, optax.sgd(0.1))
    step = nnx.jit(jfp8.nnx.value_and_grad(loss_of))
    for _ in range(2):
        before = jax.tree.map(jnp.copy, nnx.state(ours, Fp8State))
        ours.eval()
        ours(100 * X)
        jax.tree.map(np.testing.assert_array_equal, before, nnx.state(ours, Fp8State))
        ours.train()
        loss, grads = step(ours, X)
        optimizer.update(ours, grads)
    history = ours.up.dot_general.fp8["lhs"][...]
    np.testing.assert_array_equal(history[:3], [jnp.abs(X).max()] * 2 + [0])
    plain(X), plain(X)
    assert ours.drop.rngs.count[...] == plain.drop.rngs.count[...]
    np.testing.assert_allclose(ours.norm.mean[...], plain.norm.mean[...], atol=0.05)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def first_layer(self, x):
        return nnx.tanh(self.up(x))

    def last_layer(self, x):
        return self.down(x)

    def __call__(self, x):
        return self.last_layer(self.first_layer(x))


WRAPPED = {
    "eager": loss_of,
    "nnx.jit": nnx.jit(loss_of),
    "nnx.remat": nnx.remat(loss_of),
    "nnx.vmap": lambda m, x: nnx.vmap(loss_of, in_axes=(None, 0))(m, x[None]).sum(),
    "methods": lambda m, x: jnp.mean(m.last_layer(m.first_layer(x)) ** 2),
    "layers": lambda m, x: jnp.mean(m.down(nnx.tanh(m.up(x))) ** 2),
}


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("ours", [True, False])
def test_transformations_around_a_call(way, ours):
    """Losses, gradients and histories are the same, with sinks and without."""
    differentiate = jfp8.nnx.value_and_grad if ours else nnx.value_and_grad
    results = []
    for name in ("eager", way):
        model = jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())
        loss, grads = differentiate(WRAPPED[name])(model, X)
        second, _ = differentiate(WRAPPED[name])(model, 2 * X)
        # Not their checks, which hash all bits.
        state = nnx.to_pure_dict(nnx.state(model, Fp8State))
        fp8 = {name: state[name]["dot_general"]["fp8"] for name in ("up", "down")}
        histories = {k: {role: x[role] for role in ("lhs", "rhs", "grad")} for k, x in fp8.items()}
        results.append((loss, second, grads, histories))
    assert np.all(results[0][3]["down"]["rhs"][:2])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *results)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: Plain(rngs))
        self.blocks = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        return over_blocks(self.blocks, x)


def over_blocks(blocks, x):
    body = nnx.scan(nnx.remat(lambda x, f: x + f(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return body(x, blocks)


def test_a_stack_is_scanned_inside_or_outside_of_a_call():
    found = []
    for call in (lambda model, x: model(x), lambda model, x: over_blocks(model.blocks, x)):
        model = jfp8.convert(Stacked(nnx.Rngs(0)), "delayed", exempt=())
        loss = lambda model, x, call=call: jnp.mean(call(model, x) ** 2)
        step = nnx.jit(jfp8.nnx.value_and_grad(loss))
        for _ in range(2):
            value, grads = step(model, X)
        found.append((value, grads, nnx.state(model, Fp8State)))
    assert found[0][2]["blocks"]["up"]["dot_general"]["fp8"]["grad"].shape == (3, 16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)


def test_what_a_call_captures():
    class Sowing(Plain):
        def first_layer(self, x):
            self.sow(nnx.Intermediate, "x", x)
            return super().first_layer(x)

    model = jfp8.convert(Sowing(nnx.Rngs(0)), "delayed", exempt=())
    with jax.checking_leaks():
        y, found = nnx.capture(model, nnx.Intermediate)(X)
    np.testing.assert_array_equal(found["x"][0], X)
    np.testing.assert_array_equal(y, jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())(X))


def test_copies_of_a_converted_model():
    model = jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())
    jfp8.nnx.value_and_grad(loss_of)(model, X)
    expected = model(X)
    graph, state = nnx.split(model)
    copies = {
        "clone": nnx.clone(model),
        "merge": nnx.merge(graph, state),
        "pickle": pickle.loads(pickle.dumps(model)),
        "deepcopy": copy.deepcopy(model),
    }
    restored = nnx.eval_shape(lambda: jfp8.convert(Plain(nnx.Rngs(1)), "delayed", exempt=()))
    nnx.update(restored, state)
    for name, other in (copies | {"restored": restored}).items():
        assert isinstance(other, Plain), name
        np.testing.assert_array_equal(other(X), expected, err_msg=name)
        assert jax.tree.structure(nnx.state(other)) == jax.tree.structure(state), name


def test_a_model_in_fp8_weights_keeps_them_in_a_call():
    model = jfp8.convert(Net(nnx.Rngs(0)), "current", exempt=())
    nnx.update(model, jfp8.quantize_params(nnx.state(model, nnx.Param), "current"))
    stored = model.up.kernel.get_raw_value()
    model(X)  # adds a variable
    model.eval()
    again = model(X)
    assert type(model.up.kernel.get_raw_value()) is type(stored)
    np.testing.assert_array_equal(model(X), again)


def test_a_converted_model_inside_of_another():
    inner = jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())
    outer = nnx.Sequential(inner, nnx.Linear(D, D, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match="'layers/0/down' has the recipe 'delayed'"):
        jfp8.convert(outer, "current")
    converted = jfp8.convert(outer, "delayed", exempt=())
    loss, _ = jfp8.nnx.value_and_grad(loss_of)(converted, X)
    assert {path[:-1] for path in moved(converted)} == {
        ("layers", 0, "up"),
        ("layers", 0, "down"),
        ("layers", 1),
    }
    assert loss != loss_of(outer, X)


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

    model = Model(nnx.Rngs(0))
    many = [f"many/{i}" for i in range(11)]  # 10 comes after 9
    paths = [*many, "plain/y/0", "plain/y/1/0", "shared"]
    asked = []
    converted = jfp8.convert(model, RECIPE, exempt=lambda path, _: asked.append(path))
    assert list(dict.fromkeys(asked)) == paths
    assert converted.shared is converted.z["b"]
    assert converted.plain["y"][1][0].dot_general.path == "plain/y/1/0"
    y, reference = call(converted, X), call(model, X)
    assert 1e-3 < relative_error(y, reference) < 0.15


def test_the_original_is_untouched():
    model = nnx.jit(lambda: Plain(nnx.Rngs(0)))()
    reference = call(model, X)
    graphdef, state = nnx.split(model)
    arrays = [v.get_value() for _, v in nnx.to_flat_state(state)]
    variables = {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    converted = jfp8.convert(model, RECIPE, exempt=())
    assert isinstance(converted, Plain)
    kept = [v.get_value() for _, v in nnx.to_flat_state(nnx.state(converted, nnx.Param))]
    assert all(a is b for a, b in zip(arrays, kept, strict=True))  # nothing was copied

    # Training the copy changes nothing of the original.
    _, grads = nnx.jit(jfp8.nnx.value_and_grad(loss_of))(converted, X)
    optimizer = nnx.Optimizer(converted, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(converted, grads)
    assert np.any(call(converted, X) != call(jfp8.convert(model, RECIPE, exempt=()), X))
    assert nnx.graphdef(model) == graphdef
    after = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    assert {id(v) for v in after} == variables
    np.testing.assert_array_equal(call(model, X), reference)


def test_attention_itself_is_opt_in():
    model, asked = nnx.Dict(attn=nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0))), []
    exempt = lambda path, layer: asked.append((path, type(layer).__name__))
    jfp8.convert(model, RECIPE, exempt=exempt)
    assert set(asked) == {(f"attn/{n}", "LinearGeneral") for n in ("query", "key", "value", "out")}
    converted = jfp8.convert(model, RECIPE, exempt=exempt, attention=True)
    assert ("attn", "MultiHeadAttention") in asked
    assert converted["attn"].attention_fn.path == "attn/attention_fn"
    assert model["attn"].attention_fn is nnx.dot_product_attention
    is_attention = lambda path, layer: path == "attn"
    refused = jfp8.convert(model, RECIPE, exempt=is_attention, attention=True)
    assert refused["attn"].attention_fn is nnx.dot_product_attention


@pytest.mark.slow
def test_stacks_of_stacks():
    """Histories get the leading axes of the kernels, so that whatever lifts these lifts them."""
    make = nnx.vmap(nnx.vmap(lambda rngs: Plain(rngs)))
    converted = jfp8.convert(nnx.split_rngs(splits=(2, 3))(make)(nnx.Rngs(0)), RECIPE, exempt=())
    assert {h.shape for h in histories(converted).values()} == {(2, 3, 16)}
    twice = nnx.vmap(nnx.vmap(lambda block, x: block(x), in_axes=(0, None)), in_axes=(0, None))
    nnx.jit(nnx.grad(lambda model, x: jnp.sum(twice(model, x) ** 2)))(converted, X)
    found = histories(converted)["up", "dot_general", "lhs"]
    np.testing.assert_array_equal(found[..., 0], np.full((2, 3), np.abs(X).max()))
    make = nnx.vmap(lambda rngs: nnx.Linear(4, 5, use_bias=False, rngs=rngs), in_axes=0, out_axes=2)
    with pytest.raises(ValueError, match=r"\(4, 5, 3\).*leading axes"):
        jfp8.convert(nnx.split_rngs(splits=3)(make)(nnx.Rngs(0)), RECIPE, exempt=())


own_derivative = jax.custom_jvp(jnp.dot)
own_derivative.defjvp(lambda xs, ts: (jnp.dot(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))


class Home(nnx.Module):
    """Multiplies where conversion does not look: in a function with a derivative of its own."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((D, D)))
        self.more = nnx.List([nnx.Param(rngs.params.normal((D, D))), nnx.Param(jnp.ones((1, D)))])

    def __call__(self, x):
        return own_derivative(own_derivative(x, self.w[...]), self.more[0][...]) * self.more[1][...]


class Mine(nnx.Linear):
    """A class of the user with the call of Flax."""


own_dot_general = functools.partial(jax.lax.dot_general)


class Mixed(nnx.Module):
    """A product of each kind that stays in high precision, for a reason of its own."""

    def __init__(self, rngs):
        self.up, self.mine = nnx.Linear(D, D, rngs=rngs), Mine(D, D, rngs=rngs)
        self.own = nnx.Linear(D, D, dot_general=own_dot_general, rngs=rngs)
        self.by_class = nnx.LinearGeneral(D, D, dot_general_cls=lambda: own_dot_general, rngs=rngs)
        self.home = Home(rngs)
        self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.transposed = nnx.ConvTranspose(D, D, (1,), rngs=rngs)
        self.ours = jfp8.nnx.Linear(D, D, recipe=Float8CurrentScaling(), rngs=rngs)
        self.head = nnx.Linear(D, 4, rngs=rngs)

    def __call__(self, x):
        x = self.home(self.by_class(self.own(self.up(self.mine(x)))))[None]
        return self.head(self.ours(self.transposed(self.attention(x))))


def test_a_report_has_a_reason_for_every_product():
    model = Mixed(nnx.Rngs(0))
    before = nnx.graphdef(model)
    converted = jfp8.convert(model, exempt=(*jfp8.EDGES, "transposed", "up"))
    by_path = {}
    for row in jfp8.report(converted, X).rows:
        by_path.setdefault((row.path, row.layer), set()).add(row.reason)
    raw = by_path.pop(("home", "Home"))
    assert all(reason.startswith("computed by no layer that can be conv") for reason in raw)
    assert all("test_nnx.py:" in reason for reason in raw)
    projections = [f"attention/{name}" for name in ("key", "out", "query", "value")]
    assert by_path == {
        ("up", "Linear"): {"exempt: 'up'"},
        ("mine", "Mine"): {""},
        ("own", "Linear"): {"the layer was given its own dot_general"},
        ("by_class", "LinearGeneral"): {"the layer was given its own dot_general"},
        ("attention", "MultiHeadAttention"): {"inside of attention (convert with attention=True)"},
        **{(path, "LinearGeneral"): {""} for path in projections},
        ("transposed", "ConvTranspose"): {"exempt: 'transposed'"},
        ("ours", "Linear"): {""},
        ("head", "Linear"): {LOGITS},
    }
    assert isinstance(converted.mine, Mine)
    assert converted.own.dot_general is own_dot_general
    assert converted.ours.dot_general.recipe == Float8CurrentScaling()
    left = nnx.graphdef(converted)
    plain = {row.reason for row in jfp8.report(model, X).rows if row.path in ("up", "head")}
    assert plain == {"not converted"}
    assert (nnx.graphdef(model), nnx.graphdef(converted)) == (before, left)


def test_a_conversion_of_nothing_names_its_modules():
    model = jfp8.convert(nnx.Sequential(*(Home(nnx.Rngs(0)) for _ in range(6))), exempt=())
    words = r"no product: layers/0/more/0 \(16, 16\); layers/0/more/1 \(1, 16\); .* and 14 more"
    with pytest.warns(UserWarning, match=words):
        model(X)
    norm = jfp8.convert(nnx.Sequential(nnx.LayerNorm(D, rngs=nnx.Rngs(0))))
    with pytest.warns(UserWarning, match="No product of Sequential.*with an operand") as caught:
        norm(X)
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jfp8.convert(nnx.Sequential(jfp8.nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.relu))(X)


def test_layers_of_jfp8_without_a_recipe_take_that_of_the_conversion():
    """As in Linen. With a recipe of their own they keep it; the default keeps its histories."""
    rngs = nnx.Rngs(0)
    given = jfp8.nnx.Linear(D, D, recipe="current", rngs=rngs)
    make = lambda: jfp8.nnx.Linear(D, D, rngs=rngs)
    model = nnx.Dict(a=make(), b=make(), moe=jfp8.nnx.MoE(D, 2, D, rngs=rngs), given=given)
    states = lambda m: {keys[0] for keys, _ in nnx.to_flat_state(nnx.state(m, Fp8State))}
    chosen = jfp8.convert(model, {"a": None, "moe/wi": "rowwise", "*": "mxfp8"})
    assert [chosen[n].dot_general.recipe.for_layer("") for n in "ab"] == [
        None,
        jfp8.recipes.get("mxfp8"),
    ]
    assert chosen.moe.wi.ragged_dot.recipe.name == "rowwise"
    assert chosen.moe.wo.ragged_dot.recipe.name == "mxfp8"
    assert chosen.given.dot_general.recipe == given.dot_general.recipe
    assert (states(model), states(chosen)) == ({"a", "b", "moe"}, set())
    longer = jfp8.convert(model, DelayedScaling(amax_history_len=64))
    assert longer.a.dot_general.histories()["grad"].shape == (64,)
    model.a.dot_general.set_histories({"lhs": jnp.full(16, 3.0)})
    for recipe in ("delayed", DelayedScaling(margin=1)):
        kept = jfp8.convert(model, recipe).a.dot_general
        assert (kept.histories()["lhs"].max(), kept.fp8 is model.a.dot_general.fp8) == (3, False)
    assert model.a.dot_general.recipe is None
    attention = jfp8.nnx.MultiHeadAttention(2, D, attention_products=True, decode=False, rngs=rngs)
    assert jfp8.convert(attention, "mxfp8").attention_fn.recipe.name == "mxfp8"
    alone = jfp8.convert(make(), "mxfp8")
    assert {row.recipe for row in jfp8.report(alone, X).rows} == {"mxfp8"}
    assert np.array_equal(alone(X), jfp8.convert(alone, "mxfp8")(X))
    with pytest.raises(ValueError, match="converted already: '' has the recipe 'mxfp8'"):
        jfp8.convert(alone, "current")


def chain(rngs, head=nnx.Linear, **how):
    """A chain of layers, as most are written: numbers do not say which is the last."""
    up, down = (nnx.Linear(D, D, rngs=rngs) for _ in range(2))
    return nnx.Sequential(up, nnx.relu, down, nnx.relu, head(D, 10, rngs=rngs, **how))


MADE = {
    "directly": lambda make: make(nnx.Rngs(0)),
    "clone": lambda make: nnx.clone(make(nnx.Rngs(0))),
    "merge": lambda make: nnx.merge(*nnx.split(make(nnx.Rngs(0)))),
    "abstract": lambda make: nnx.eval_shape(lambda: make(nnx.Rngs(0))),
}


def stayed(model):
    return {row.path for row in jfp8.report(model, X).rows if not row.fp8}


@pytest.mark.parametrize("made", MADE)
def test_the_same_layers_stay_however_a_model_was_made(made):
    """No other layer is taken for a head that is in FP8."""
    assert stayed(jfp8.convert(MADE[made](chain), "current")) == {"layers/4"}
    in_fp8 = functools.partial(chain, head=jfp8.nnx.Linear, recipe="current")
    assert stayed(jfp8.convert(MADE[made](in_fp8), "current")) == set()


def test_parts_that_are_called_alone():
    """They return no logits; with an example they stay as they are where the model's do."""
    plain = chain(nnx.Rngs(0))
    part = jfp8.convert(plain, "current").layers[0]
    assert not jnp.array_equal(part(X), plain.layers[0](X))
    alone = jfp8.convert(plain.layers[0], "current", exempt=())
    assert jnp.array_equal(alone(X), part(X))
    model = jfp8.convert(plain, "delayed", jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert stayed(model) == {"layers/4"}
    assert {path[:2] for path in histories(model)} == {("layers", 0), ("layers", 2)}
    assert jnp.array_equal(model.layers[4](X), plain.layers[4](X))


class Multiplies(nnx.Module):
    """One product with a parameter, a layer's or a child's; `way` says how it is written."""

    def __init__(self, way="value"):
        self.way, self.w = way, parameter(nnx.Rngs(0), (D, D))
        self.held = nnx.List([parameter(nnx.Rngs(1), (D, D))])
        if way == "of a layer":
            self.layer = nnx.Linear(D, D, rngs=nnx.Rngs(2))
        self.calls = nnx.Variable(jnp.zeros((), int))
        if way in ("of a child", "nnx.jit", "in nnx.jit", "in nnx.remat"):
            self.child = Multiplies()

    def __call__(self, x):
        self.calls[...] += 1
        return WAYS[self.way](self, x)

    def multiplied(self, x):
        return x @ self.w


WAYS = {
    "value": lambda m, x: x @ m.w.get_value(),
    "of a list": lambda m, x: x @ m.held[0][...],
    "the variable": lambda m, x: jnp.einsum("td,df->ft", x, m.w),
    "of a child": lambda m, x: x @ m.child.w[...].astype(jnp.bfloat16).astype(jnp.float32),
    "nnx.jit": lambda m, x: nnx.jit(lambda child, x: child(x))(m.child, x),
    "in nnx.jit": lambda m, x: nnx.jit(lambda m, x: x @ m.w[...])(m.child, x),
    "of a layer": lambda m, x: x @ (m.layer.kernel[...] * jnp.tri(D)),
    "in nnx.remat": lambda m, x: nnx.remat(lambda child, x: child(x))(m.child, x),
    "a method": lambda m, x: m.multiplied(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.representative(2)
def test_however_it_is_written(way):
    model = Multiplies(way)
    converted = jfp8.convert(model, "delayed", exempt=())
    assert all(row.fp8 for row in jfp8.report(converted, X).rows)
    assert 1e-3 < relative_error(converted(X), model(X)) < 0.1  # eager
    np.testing.assert_array_equal(nnx.jit(lambda m: m(X))(converted), converted(X))
    assert not moved(converted)
    record(converted, X)
    changed = converted.child if "nnx." in way and way != "in nnx.jit" else converted
    assert changed.calls[...] == 4  # once a call, as of the model itself
    assert {path[-1] for path, x in histories(converted).items() if x.any()} == {"lhs", "rhs"}
    assert len(moved(converted)) == 1


class Own(nnx.Module):
    """A module of the user's own: a matrix, or with a recipe jfp8's product of it."""

    def __init__(self, rngs, recipe=None):
        self.w = parameter(rngs, (8, 8))
        if recipe is not None:
            self.op = jfp8.nnx.EinsumOp(recipe=recipe)

    def __call__(self, x):
        return getattr(self, "op", jnp.einsum)("btd,df->btf", x, self.w[...])


BATCH = jax.random.normal(jax.random.key(2), (2, 6, 8))
TOKENS = jnp.arange(12).reshape(2, 6)
scanned = lambda run: nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)


@pytest.mark.parametrize("inside", [True, False])
def test_stacks_are_converted_inside_or_as_a_whole(inside):
    """As a whole, nothing tells that a module is stacked: all share one history."""

    class Stack(nnx.Module):
        def __init__(self, make):
            self.layers = nnx.vmap(make)(jax.random.split(jax.random.key(0), 16))

        def __call__(self, x):
            return scanned(lambda x, f: jnp.tanh(f(x)))(x, self.layers)

    make = lambda key: Own(nnx.Rngs(key))
    convert = functools.partial(jfp8.convert, recipe="delayed", exempt=())
    stack = Stack(lambda key: convert(make(key))) if inside else convert(Stack(make))
    jfp8.nnx.value_and_grad(lambda m: jnp.sum(m(BATCH)))(stack)
    history = stack.layers.DotGeneral_w.fp8["rhs"][...]
    largest = jnp.abs(stack.layers.w[...]).max((1, 2))
    # A sink adds up the amaxes of several uses, to 3 bits.
    rtol = 1e-6 if inside else 2**-4
    np.testing.assert_allclose(history[..., 0], largest if inside else largest.max(), rtol=rtol)
    by_example = jfp8.convert(Stack(make), "delayed", BATCH, exempt=())
    assert by_example.layers.DotGeneral_w.fp8["rhs"].shape == (16, 16)


class Norm(nnx.RMSNorm):
    """A user's own: its vector is a matrix where layers are stacked."""


class MixedLayer(nnx.Module):
    """A module of the user's own with a layer of Flax."""

    def __init__(self, rngs, recipe=None):
        self.norm, self.own = Norm(8, rngs=rngs), Own(rngs, recipe)
        hook = {"dot_general": jfp8.nnx.DotGeneral(recipe=recipe)} if recipe else {}
        self.linear = nnx.Linear(8, 8, rngs=rngs, **hook)

    def __call__(self, x):
        return x + self.linear(nnx.gelu(self.own(self.norm(x))))


class Scanned(nnx.Module):
    """The structure of a language model, with layers that `nnx.vmap` stacks."""

    def __init__(self, rngs, recipe=None, layers=3):
        make = nnx.vmap(lambda rngs: MixedLayer(rngs, recipe))
        self.embed, self.position = nnx.Embed(16, 8, rngs=rngs), parameter(rngs, (1, 6, 8))
        self.first = Own(rngs, recipe)  # It may have as many rows as there are layers.
        self.layers = nnx.split_rngs(splits=layers)(make)(rngs)
        self.norm, self.head = Norm(8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.first(self.embed(tokens) + self.position)
        x = scanned(lambda x, layer: layer(x))(x, self.layers)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("layers", "ours"), [(3, True), (8, False)])
@pytest.mark.representative(1)
def test_own_modules_in_a_stack_with_layers_of_flax(layers, ours):
    """That a module is stacked shows in the kernels; 8 is the number of features too."""
    loss = lambda model, tokens: jnp.mean(model(tokens) ** 2)
    step = nnx.jit((jfp8.nnx if ours else nnx).value_and_grad(loss))
    converted = jfp8.convert(Scanned(nnx.Rngs(0), layers=layers), "delayed")
    written = Scanned(nnx.Rngs(0), "delayed", layers=layers)
    for _ in range(2):
        (value, grads), (wanted, expected) = step(converted, TOKENS), step(written, TOKENS)
        assert value == wanted
    assert value != loss(Scanned(nnx.Rngs(0), layers=layers), TOKENS)
    own, op = converted.layers.own.DotGeneral_w.fp8, written.layers.own.op.fp8
    # In a loop a converted model computes GELU again, and XLA fuses it otherwise.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    for role in ("lhs", "rhs", *(["grad"] if ours else [])):
        assert np.all(own[role][:, :2])
        close(own[role][...], op[role][...])
    close(grads.layers.norm.scale[...], expected.layers.norm.scale[...])
    assert not hasattr(converted.layers.norm, "DotGeneral_scale")
    assert converted.first.DotGeneral_w.fp8["lhs"].shape == (16,)
    fp8 = {row.path for row in jfp8.report(converted, TOKENS).rows if row.fp8}
    assert fp8 == {"first", "layers/own", "layers/linear"}


def test_adapters_that_are_added_to_a_layer():
    """Qwix adds them to ``jax.lax.dot_general``, which a layer must go on calling."""

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(D, D, rngs=rngs)
            self.layer.kernel_lora_a = nnx.LoRAParam(jnp.ones((D, 1)))
            self.layer.kernel_lora_b = nnx.LoRAParam(jnp.ones((1, D)))

        def __call__(self, x):
            low_rank = x @ self.layer.kernel_lora_a @ self.layer.kernel_lora_b
            return jnp.tanh(self.layer(x) + low_rank)

    converted = jfp8.convert(Adapted(nnx.Rngs(0)), "delayed")
    rows = [row for row in jfp8.report(converted, X).rows if row.kind in ("fprop", "forward")]
    assert [row.fp8 for row in rows] == [False, False, True]
    nnx.grad(lambda m: jnp.sum(m(X)))(converted)
    assert moved(converted) == {("layer", "dot_general")}
    lora = nnx.Sequential(nnx.LoRALinear(D, D, lora_rank=2, rngs=nnx.Rngs(0)), nnx.relu)
    assert stayed(jfp8.convert(lora, "current")) == {"layers/0/lora"}
