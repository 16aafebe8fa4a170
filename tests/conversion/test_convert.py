"""`convert` of Linen models: nothing but the products changes, and all of those do."""

from collections import Counter
from functools import partial

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.scope import in_filter
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.rowwise import RowwiseScaling
from support.arrays import assert_same, relative_error
from support.models import Model, products_in, trained

KEY = jax.random.key(0)
DELAYED, CURRENT = DelayedScaling(), Float8CurrentScaling()
X = jax.random.normal(jax.random.key(1), (4, 8))
IMAGES = jax.random.normal(jax.random.key(2), (2, 6, 6, 3))
SEQUENCES = jax.random.normal(jax.random.key(3), (2, 5, 8))


def loss_of(model):
    def loss(variables, batch):
        mutable = [k for k in variables if k not in ("params", "fp8", "fp8_sink")]
        y, mutated = model.apply(variables, batch, mutable=mutable)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y)), mutated

    return loss


def products(model, x) -> Counter:
    """Products in ``model`` and in its gradient with respect to the parameters."""
    others = dict(jax.eval_shape(model.init, KEY, x))
    params, _ = others.pop("params"), others.pop("fp8_sink", None)
    loss = lambda params, others: loss_of(model)({"params": params, **others}, x)[0]
    closed = jax.make_jaxpr(jax.grad(loss))(params, others)
    needed = [True] * len(closed.jaxpr.outvars)
    return products_in(partial_eval.dce_jaxpr(closed.jaxpr, needed)[0])


def assert_histories_moved(model, variables, x, products):
    """After a step all histories have one positive entry. Returns the parameters."""
    state = trained(loss_of(model), variables, x)
    is_state = lambda node: isinstance(node, dict) and "amax_history" in node
    roles = [node for node in jax.tree.leaves(state.fp8, is_leaf=is_state) if is_state(node)]
    assert len(roles) == 3 * products
    for role in roles:
        history = np.asarray(role["amax_history"])
        assert np.all(history[..., 0] > 0)
        assert not history[..., 1:].any()
        assert not role["amax"].any()
    return state.params


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(inputs=x))
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(x)


class Setup(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(16), nn.Dense(8)]
        self.head = nn.Dense(3)

    def __call__(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(x))), None


STACK = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SHARED = {"split_rngs": {"params": False}}


def lifted(block):
    """Blocks under a transformation of Flax's, and a head."""
    blocks = lambda x: block(name="blocks")(x, None)[0]
    return Model(lambda module, x: nn.Dense(3, name="head")(blocks(x)))


def norms(module, x):
    """A residual network with BatchNorm."""
    norm = partial(nn.BatchNorm, use_running_average=False)
    x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
    h = nn.relu(norm()(nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)))
    h = norm()(nn.Conv(8, (1, 1), use_bias=False)(h)) + nn.avg_pool(x, (2, 2), (2, 2))
    return nn.Dense(3)(h.mean((1, 2)))


def kinds(module, x):
    """One of each layer of Flax's that has a product."""
    x = nn.DenseGeneral((2, 4))(x)
    x = nn.DenseGeneral(8, axis=(-2, -1))(x)
    x = nn.Einsum((8, 8), "bsf,fg->bsg")(x)
    x = nn.Conv(8, (3,))(x)
    x = nn.ConvTranspose(8, (3,))(x)
    x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(x)
    x = nn.RNN(nn.SimpleCell(8))(x)
    return nn.Dense(3)(x)


MODELS = {
    # Model, input, number of FP8 layers, and of products; the head has 3 plain ones, attention 6.
    "compact": (Compact(), X, 2, {"fprop": 2, "dgrad": 1, "wgrad": 2, "plain": 3}),
    "setup": (Setup(), X, 2, {"fprop": 2, "dgrad": 1, "wgrad": 2, "plain": 3}),
    "stacked": (
        *(lifted(nn.scan(Block, length=3, **STACK)), X, 2),
        {"fprop": 2, "dgrad": 2, "wgrad": 2, "plain": 3},
    ),
    "stacked remat": (
        *(lifted(nn.scan(nn.remat(Block), length=3, **STACK)), X, 2),
        {"fprop": 3, "dgrad": 2, "wgrad": 2, "plain": 3},  # `up` again; `down` is not needed
    ),
    "shared": (
        *(lifted(nn.scan(Block, variable_broadcast="params", length=3, **SHARED)), X, 2),
        {"fprop": 2, "dgrad": 2, "wgrad": 2, "plain": 3},
    ),
    "vmap": (
        *(lifted(nn.vmap(Block, in_axes=(0, None), **STACK)), SEQUENCES, 2),
        {"fprop": 2, "dgrad": 1, "wgrad": 2, "plain": 3},
    ),
    "vmap shared": (
        lifted(nn.vmap(Block, in_axes=(0, None), variable_axes={"params": None}, **SHARED)),
        *(SEQUENCES, 2, {"fprop": 2, "dgrad": 1, "wgrad": 2, "plain": 3}),
    ),
    "nested": (
        *(lifted(nn.jit(nn.remat(Block))), X, 2),
        {"fprop": 3, "dgrad": 1, "wgrad": 2, "plain": 3},
    ),
    "norms": (Model(norms), IMAGES, 2, {"fprop": 2, "dgrad": 2, "wgrad": 2, "plain": 2 + 3}),
    "kinds": (Model(kinds), SEQUENCES, 11, {"fprop": 11, "dgrad": 10, "wgrad": 11, "plain": 9}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_fp8_forward_and_backward(name):
    model, x, _, expected = MODELS[name]
    assert products(jfp8.convert(model, CURRENT), x) == expected
    n = sum(expected.values())
    stock = products(model, x)
    assert set(stock) == {"plain"}
    if "remat" not in name and name != "nested":  # JAX repeats what it wants
        assert stock["plain"] == n


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n != "stacked"])
def test_parameters_are_those_of_the_model_and_histories_move(name):
    model, x, layers, _ = MODELS[name]
    converted = jfp8.convert(model, DELAYED)

    @jax.jit
    def run(key, x):
        stock, variables = model.init(key, x), converted.init(key, x)
        mutable = [k for k in stock if k != "params"]
        # Either checkpoint fits either model.
        applied = [m.apply(stock, x, mutable=mutable)[0] for m in (model, converted)]
        return stock, variables, *applied, converted.apply(variables, x, mutable=mutable)[0]

    stock, variables, y, ours, empty_histories = run(KEY, x)
    assert set(variables) == {*stock, "fp8", "fp8_sink"}
    assert_same({k: variables[k] for k in stock}, stock)
    assert 1e-4 < relative_error(ours, y) < 0.2  # as far apart as FP8 is
    assert relative_error(empty_histories, ours) < 1e-5  # they stand for current scaling

    params = assert_histories_moved(converted, variables, x, layers)
    assert jax.tree.structure(params) == jax.tree.structure(stock["params"])
    assert np.isfinite(jax.tree.leaves(params)[0]).all()


# The oracle.


def conv_net(module, x):
    x = nn.relu(nn.Conv(8, (3, 3))(x))
    x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
    x = nn.relu(nn.Conv(8, (3, 3))(x))
    return nn.Dense(3)(x.mean((1, 2)))


def filled(variables, amax=20.0):
    """With histories that matter: scales that differ from current ones."""
    fp8 = jax.tree.map(lambda a: jnp.full_like(a, amax) if a.ndim else a, variables["fp8"])
    return {**variables, "fp8": fp8}


@pytest.fixture(scope="module")
def setup_model():
    model = jfp8.convert(Setup(), DELAYED)
    variables = filled(jax.jit(model.init)(KEY, X))
    y = model.apply(variables, X)
    assert relative_error(model.apply({"params": variables["params"]}, X), y) > 1e-4
    return model, variables


@pytest.mark.slow
def test_bound_models(setup_model):
    model, variables = setup_model
    bound = model.bind(variables)
    np.testing.assert_array_equal(bound(X), model.apply(variables, X))
    np.testing.assert_array_equal(bound.encode(X), model.apply(variables, X, method="encode"))
    unbound, again = bound.unbind()
    assert unbound == model
    np.testing.assert_array_equal(unbound.apply(again, X), bound(X))
    variables = {k: variables[k] for k in ("params", "fp8")}
    bound = model.bind(variables, mutable=["fp8"])
    y, mutated = model.apply(variables, X, mutable=["fp8"])
    np.testing.assert_array_equal(bound(X), y)
    assert_same(bound.variables["fp8"], mutated["fp8"])


@pytest.mark.slow
def test_methods(setup_model):
    """By name, by function, and of the original class; what a method returns is at the edge."""
    model, variables = setup_model
    h = model.apply(variables, X, method="encode")
    np.testing.assert_array_equal(model.apply(variables, X, method=Setup.encode), h)
    np.testing.assert_array_equal(model.apply(variables, X, method=type(model).encode), h)
    np.testing.assert_array_equal(model.apply(variables, X, method=lambda m, x: m.encode(x)), h)
    np.testing.assert_array_equal(nn.apply(lambda m, x: m.encode(x), model)(variables, X), h)
    assert 1e-4 < relative_error(h, Setup().apply(variables, X, method="encode")) < 0.2
    with jfp8.autocast(enabled=False):
        np.testing.assert_array_equal(
            model.apply(variables, X, method="encode"), Setup().apply(variables, X, method="encode")
        )


@pytest.mark.slow
def test_init_with_output(setup_model):
    model, _ = setup_model
    y, variables = model.init_with_output(KEY, X)
    assert_same(variables, model.init(KEY, X))
    np.testing.assert_array_equal(y, model.apply(variables, X))
    only_params = model.init(KEY, X, mutable=["params"])
    assert_same(only_params, Setup().init(KEY, X))
    h, variables = model.init_with_output(KEY, X, method="encode")
    assert set(variables["params"]) == {"layers_0", "layers_1"}
    assert h.shape == (4, 8)
    assert_same(variables["params"], Setup().init(KEY, X, method="encode")["params"])


@pytest.mark.slow
@pytest.mark.parametrize("mutable", [True, ["params"], "fp8", nn.DenyList("fp8"), []])
def test_mutable_is_obeyed(setup_model, mutable):
    model, variables = setup_model
    variables = {k: variables[k] for k in ("params", "fp8")}
    y, mutated = model.apply(variables, X, mutable=mutable)
    np.testing.assert_array_equal(y, model.apply(variables, X))
    assert set(mutated) == {c for c in ("params", "fp8") if in_filter(mutable, c)}
    if "params" in mutated:
        assert_same(mutated["params"], variables["params"])
    if "fp8" in mutated:  # nothing is recorded without a gradient
        assert_same(mutated["fp8"], variables["fp8"])
        loss = lambda params: model.apply(variables | {"params": params}, X, mutable=mutable)
        _, mutated = jax.grad(lambda p: (loss(p)[0].sum(), loss(p)[1]), has_aux=True)(
            variables["params"]
        )
        found = mutated["fp8"]["layers_0"]["DotGeneral_0"]
        assert found["lhs"]["amax_history"][0] == np.abs(X).max()
        assert (found["grad"]["amax_history"] == 20).all()  # as it was


@pytest.mark.slow
def test_frozen_dicts_and_intermediates(setup_model):
    model, variables = setup_model
    y, mutated = model.apply(
        flax.core.freeze(variables), X, capture_intermediates=True, mutable=["intermediates"]
    )
    np.testing.assert_array_equal(y, model.apply(variables, X))
    assert list(mutated) == ["intermediates"]
    np.testing.assert_array_equal(mutated["intermediates"]["__call__"][0], y)
    assert "__call__" in mutated["intermediates"]["layers_0"]


@pytest.mark.slow
def test_part_of_a_model_that_is_not_converted():
    """A model of one's own with a converted part, at which patterns begin."""
    outer = lambda part: nn.Sequential([part, nn.Dense(3)])
    stock, model = outer(Compact()), outer(jfp8.convert(Compact(), DELAYED))
    variables = jax.jit(model.init)(KEY, X)
    assert_same(variables["params"], stock.init(KEY, X)["params"])
    assert set(variables["fp8"]) == {"layers_0"}
    assert set(variables["fp8"]["layers_0"]) == {"Dense_0", "Dense_1", "Dense_2"}  # no logits here
    assert products(model, X) == {"fprop": 3, "dgrad": 2, "wgrad": 3, "plain": 3}
    assert_histories_moved(model, variables, X, 3)
    model = outer(jfp8.convert(Compact(), DELAYED, exempt="Dense_1"))
    assert set(jax.eval_shape(model.init, KEY, X)["fp8"]["layers_0"]) == {"Dense_0", "Dense_2"}


@pytest.mark.slow
def test_converted_parts_with_recipes_of_their_own():
    model = nn.Sequential([jfp8.convert(nn.Dense(8), DELAYED, exempt=()), nn.Dense(8)])
    converted = jfp8.convert(model, RowwiseScaling(), exempt=())
    variables = jax.jit(converted.init)(KEY, X)
    assert set(variables["fp8"]) == {"layers_0"}
    recipes = {row.path: row.recipe for row in jfp8.report(converted, variables, X).rows}
    assert recipes == {"layers_0": "delayed", "layers_1": "rowwise"}
    assert_histories_moved(converted, variables, X, 1)


def converted_layers(model, *inputs, **kwargs) -> set[str]:
    """The paths of layers with histories."""
    shapes = jax.eval_shape(jfp8.convert(model, DELAYED, **kwargs).init, KEY, *inputs)
    paths = jax.tree.leaves_with_path(shapes.get("fp8", {}))
    keys = ["/".join(k.key for k in path) for path, _ in paths]
    return {key.split("/DotGeneral")[0].split("/ConvGeneral")[0] for key in keys}


@pytest.mark.parametrize("name", ["exempt", "only"])
def test_a_pattern_or_type_that_matches_nothing(name):
    model = jfp8.convert(Compact(), DELAYED, **{name: "encoder/*"})
    words = r"'encoder/\*' matches no layer of the model. Layers: Dense_0, Dense_1, Dense_2"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(model.init, KEY, X)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(model.apply, jax.eval_shape(Compact().init, KEY, X), X)
    model = jfp8.convert(Compact(), DELAYED, **{name: [nn.Conv, "Dense_0"]})
    with pytest.raises(ValueError, match="no layer of type Conv.*It has: .*Dense"):
        jax.eval_shape(model.init, KEY, X)


def own_dot_general(*args, **kwargs):
    return 2 * jax.lax.dot_general(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"dot_general": own_dot_general}, {"dot_general_cls": lambda: own_dot_general}]
)
def test_a_layer_with_a_product_of_its_own_keeps_it(given):
    model = nn.Sequential([nn.Dense(8, **given), nn.Dense(8), nn.Dense(3)])
    model = jfp8.convert(model, CURRENT, exempt=())
    assert products(model, X) == {"fprop": 2, "dgrad": 2, "wgrad": 2, "plain": 2}
    alone = jfp8.convert(nn.Dense(8, **given), CURRENT, exempt=())
    variables = alone.init(KEY, X)
    np.testing.assert_array_equal(alone.apply(variables, X), 2 * nn.Dense(8).apply(variables, X))


@pytest.mark.slow
def test_layers_of_jfp8_keep_recipe_and_implementation():
    model = nn.Sequential(
        [
            jfp8.Dense(8, recipe=RowwiseScaling()),
            jfp8.Dense(8, implementation="xla"),
            jfp8.Einsum((8, 8), "ab,bc->ac"),
            nn.Dense(3),
        ]
    )
    converted = jfp8.convert(model, CURRENT)
    shapes = jax.eval_shape(converted.init, KEY, X)
    rows = jfp8.report(converted, shapes, X).rows
    assert {row.path: row.recipe for row in rows} == {
        "layers_0": "rowwise",
        "layers_1": "current",
        "layers_2": "current",
        "layers_3": "",
    }
    # XLA multiplies f8 x f8 on this device for ``implementation="xla"`` alone.
    text = jax.jit(converted.apply).lower(shapes, X).as_text()
    assert any("dot_general" in t and "f8E4M3FN>" in t.split("->")[0] for t in text.splitlines())


@pytest.mark.slow
def test_modules_named_like_operands():
    class Gated(nn.Module):
        def setup(self):
            self.lhs, self.rhs, self.grad, self.amax = (nn.Dense(8) for _ in range(4))

        def __call__(self, x):
            return self.amax(self.lhs(x) * nn.sigmoid(self.rhs(x)) + self.grad(x))

    model = jfp8.convert(Gated(), DELAYED, exempt=())
    variables = jax.jit(model.init)(KEY, X)
    assert set(variables["fp8"]) == {"lhs", "rhs", "grad", "amax"}
    assert_histories_moved(model, variables, X, 4)


def test_a_module_that_looks_up_its_own_attributes():
    """As gemma's Transformer does. Flax treats `__getattr__` as a method of the model."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

        def __getattr__(self, name):
            return 4 if name == "features" else super().__getattr__(name)

    assert converted_layers(Own(), X, exempt=()) == {"Dense_0"}


@pytest.mark.slow
def test_subclasses_of_layers():
    class Scaled(nn.Dense):
        def __call__(self, x):
            return 2 * super().__call__(x)

    model = nn.Sequential([Scaled(8), nn.Dense(3)])
    assert converted_layers(model, X) == {"layers_0"}
    assert converted_layers(model, X, exempt=Scaled) == {"layers_1"}
    assert converted_layers(model, X, only=nn.Dense) == {"layers_0", "layers_1"}


@pytest.mark.slow
def test_boxed_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Sequential([nn.Dense(8, kernel_init=init), nn.Dense(3)])
    converted = jfp8.convert(model, DELAYED)
    variables = jax.jit(converted.init)(KEY, X)
    assert_same(variables["params"], jax.jit(model.init)(KEY, X)["params"])
    assert nn.get_partition_spec(variables)["params"]["layers_0"]["kernel"] == P(None, "model")
    assert_histories_moved(converted, nn.unbox(variables), X, 1)


@pytest.mark.slow
def test_layers_stacked_along_another_axis():
    """Histories are stacked along the first, wherever parameters are."""
    model = lifted(nn.scan(Block, length=3, **{**STACK, "variable_axes": {"params": 1}}))
    converted = jfp8.convert(model, DELAYED)
    variables = converted.init(KEY, X)
    assert_same(variables["params"], model.init(KEY, X)["params"])
    assert_histories_moved(converted, variables, X, 2)
    assert products(jfp8.convert(model, CURRENT), X)["fprop"] == 2


def test_models_are_values():
    class Wide(nn.Module):
        features: int = 8

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

    make = lambda n, **kwargs: jfp8.convert(Wide(n), CURRENT, **kwargs)
    assert make(8) == make(8)
    assert hash(make(8)) == hash(make(8))
    others = [make(9), make(8, exempt="Dense_0"), jfp8.convert(Wide(8), DELAYED), Wide(8)]
    assert all(make(8) != other for other in others)
    assert make(8).clone(features=9) == make(9)
    assert make(8).features == 8
    assert make(8).copy() == make(8)
    assert isinstance(make(8), Wide)
    assert type(make(8)).__name__ == "Wide"


own_derivative = jax.custom_jvp(jnp.dot)
own_derivative.defjvp(lambda xs, ts: (jnp.dot(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))


class OwnEinsum(nn.Module):
    """A home-made layer, whose product cannot be seen from outside."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (8, 8))
        return own_derivative(x, w)


class HomeMade(nn.Module):
    """Nothing in it is a layer of Flax with a product, but the head."""

    @nn.compact
    def __call__(self, x):
        for _ in range(5):
            x = x + OwnEinsum()(nn.LayerNorm()(x))
        return nn.Dense(3)(x)


def test_a_conversion_of_nothing_says_what_it_saw_once():
    model = jfp8.convert(HomeMade(), CURRENT)
    with pytest.warns(UserWarning, match="No product of HomeMade is FP8") as caught:
        variables = jax.eval_shape(model.init, KEY, X)
    jax.eval_shape(model.apply, variables, X)
    assert jfp8.report(model, variables, X).fp8_fraction == 0
    (warning,) = caught
    text = str(warning.message)
    assert warning.filename == __file__
    assert "Dense at 'Dense_0': exempt: a layer whose result the model returns" in text
    assert "OwnEinsum at 'OwnEinsum_3', 'w' (8, 8); and 1 more." in text
    assert "use jfp8.linen.DotGeneral or EinsumProduct" in text
    assert "LayerNorm" not in text
    with pytest.warns(UserWarning, match="No product of HomeMade is FP8"):
        jax.eval_shape(jfp8.convert(HomeMade(), CURRENT).apply, variables, X)


JittedBlock = nn.jit(Block)


class Partly(nn.Module):
    """A part of it is home-made, the other is Flax's under ``nn.jit``."""

    @nn.compact
    def __call__(self, x):
        return OwnEinsum()(JittedBlock(name="block")(x)[0])

    @nn.compact
    def encode(self, x):
        return OwnEinsum(name="OwnEinsum_0")(x)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (HomeMade(), {"exempt": nn.Dense}),
        (HomeMade(), {"only": lambda path, layer: False}),
        (HomeMade(), {"exempt": ()}),
        (nn.Sequential([jfp8.Dense(8), nn.relu]), {}),
        (Partly(), {}),
    ],
    ids=["exempt", "only", "head", "layers of jfp8", "nn.jit"],
)
def test_who_chose_it_or_has_fp8_is_not_warned(model, options):
    model = jfp8.convert(model, CURRENT, **options)
    for _ in range(2):  # what is under nn.jit is traced in the first alone
        variables = jax.eval_shape(model.init, KEY, X)
        jax.eval_shape(model.apply, variables, X)


def test_a_part_of_a_model_or_a_region_without_fp8_is_not_warned():
    model = jfp8.convert(Partly(), CURRENT)
    variables = jax.eval_shape(model.init, KEY, X)
    jax.eval_shape(partial(model.apply, method="encode"), variables, X)
    with jfp8.autocast(enabled=False):
        jax.eval_shape(jfp8.convert(HomeMade(), CURRENT).init, KEY, X)


def jitted(module, x):
    block = nn.jit(Block)  # Flax traces it once for both
    x, _ = block(name="one")(x)
    x, _ = block(name="two")(x)
    return nn.Dense(3)(x)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Compact(), Model(jitted)], ids=["compact", "nn.jit"])
def test_no_trace_of_another_recipe_is_used(model):
    """Conversions of one model in one process, in any order, and the model itself."""
    variables = jax.jit(model.init)(KEY, X)
    recipes = [CURRENT, RowwiseScaling(), Float8CurrentScaling(fp8_format="E5M2")]
    models = [model, *(jfp8.convert(model, recipe, exempt=()) for recipe in recipes)]
    first = [np.asarray(jax.jit(m.apply)(variables, X)) for m in models]
    again = [np.asarray(jax.jit(m.apply)(variables, X)) for m in reversed(models)][::-1]
    for i, y in enumerate(first):
        np.testing.assert_array_equal(again[i], y)
        for other in first[:i]:
            assert relative_error(y, other) > 1e-3


def test_patterns_choose_layers_inside_of_jitted_blocks():
    """The same ones in every block of a class: Flax traces it once for all of them."""
    assert converted_layers(Model(jitted), X, exempt="*/down") == {"one/up", "two/up", "Dense_0"}


def test_types_are_found_in_jitted_blocks_each_time():
    one = Model(lambda module, x: nn.jit(Block)(name="one")(x)[0])
    for made in (one, Partly()):  # Flax traces the block of the second in the first call alone
        model = jfp8.convert(made, DELAYED, only=nn.Dense)
        assert jax.eval_shape(model.init, KEY, X) == jax.eval_shape(model.init, KEY, X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jfp8.convert(Compact), "a Flax Linen or NNX module, got the class Compact"),
        (lambda: jfp8.convert({"params": {}}), "not its class or its parameters"),
        (lambda: jfp8.convert("delayed", Compact()), "a model, which comes first"),
        (lambda: jfp8.convert(Compact(), DelayedScaling), "recipe"),
        (lambda: jfp8.convert(Compact(), exempt=3), "exempt=3: must be patterns of paths"),
        (lambda: jfp8.convert(Compact(), only=[3]), r"only=\[3\]: must be patterns of paths"),
        (
            lambda: jfp8.convert(Compact().bind(Compact().init(KEY, X))),
            "bound to variables. Convert the model first, then call .bind or .apply",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_an_exempt_layer_may_round_to_fp8_itself():
    rounds = nn.Dense(16, dtype=jnp.float8_e4m3fn)
    plain = nn.Sequential([rounds, lambda x: x.astype(jnp.float32), nn.Dense(16)])
    model = jfp8.convert(plain, "current", exempt="layers_0")
    assert model.init(KEY, X).keys() == {"params"}
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        jfp8.convert(plain, "current", exempt=()).init(KEY, X)
