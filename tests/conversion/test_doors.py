"""One model behind three doors, as a function, in Linen and in NNX: the same bits, by oracles."""

import dataclasses
import functools
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jfp8
from support.arrays import assert_same, cosine, relative_error
from support.doors import DOORS, KEY, converted, loss_of, moved, multiply, original
from support.layers import fake

X = jax.random.normal(jax.random.key(0), (64, 16))
NAMES = ("q", "k", "v", "o")
KEYS = jax.random.split(jax.random.key(1), 4)
PARAMS = {name: jax.random.normal(key, (16, 16)) / 4 for name, key in zip(NAMES, KEYS, strict=True)}
STACK = jax.random.normal(jax.random.key(1), (3, 16, 16)) / 3
RECIPE = jfp8.recipes.DelayedScaling(amax_history_len=4)
EMPTY = jfp8.scaling.init_overwritten(RECIPE.init_state())
every_door = pytest.mark.parametrize("door", DOORS)

# The oracle: the same program with `scaled_dot_general` in the place of its matmuls.


def by_hand(recipe, x, w, variable):
    state, sink = None, None
    if recipe.init_state() is not None:
        state, sink = jfp8.scaling.read_overwritten(variable, recipe.init_state())
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return jfp8.scaled_dot_general(x, w, numbers, recipe=recipe, state=state, sink=sink)


def plain(x, w, variable):
    return multiply(x, w)


def four_layers(mm, p, s, x):
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))  # not an argument of the model
    q, k, v = (mm(x, p[name], s[name]) for name in "qkv")
    return mm(jnp.tanh(q * k + v), p["o"], s["o"])


def scan_over_stack(mm, p, s, x):
    def body(h, a):
        return jnp.tanh(mm(h, *a)), h.sum()

    h, sums = lax.scan(jax.checkpoint(body), x, (p["w"], s["w"]))
    return h + sums.sum()


def used_twice(mm, p, s, x):
    return jnp.tanh(mm(jnp.tanh(mm(x, p["w"], s["w"])), p["w"], s["w"]))


def loop_in_loop(mm, p, s, x):
    inner = lambda h, a: (jnp.tanh(mm(h, *a)), None)
    outer = lambda h, _: (lax.scan(inner, h, (p["w"], s["w"]))[0], None)
    return lax.scan(outer, x, None, length=2)[0]


def stack_of_stacks(mm, p, s, x):
    inner = lambda h, a: (jnp.tanh(mm(h, *a)), None)
    outer = lambda h, a: (lax.scan(inner, h, a)[0], None)
    return lax.scan(outer, x, (p["w"][:, None], s["w"]))[0]


def by_index(mm, p, s, x):
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(mm(x, p["w"][i], s["w"])), x)


def branches(mm, p, s, x):
    run = lambda x: jnp.tanh(mm(x, p["w"], s["w"]))
    return lax.cond(x.sum() > -1e9, run, lambda x: x, x)


def transposed(mm, p, s, x):
    if mm is plain:
        return jnp.sin(jnp.einsum("oi,bi->ob", p["w"].T, x)).T
    return jnp.sin(mm(x, p["w"], s["w"]))


def over_devices(mm, p, s, x):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=auto)
    specs = jax.P(), jax.P(), jax.P("d")
    run = lambda p, s, x: jax.jit(jnp.tanh)(mm(x, p, s))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))(p["w"], s["w"], x)


ONE = {"w": STACK[0]}
PROGRAMS = {
    # Parameters, those that are layers of Flax, and the stacks of states.
    four_layers: (PARAMS, NAMES, ()),
    scan_over_stack: ({"w": STACK}, (), (3,)),
    used_twice: (ONE, (), ()),
    loop_in_loop: ({"w": STACK}, (), (3,)),
    stack_of_stacks: ({"w": STACK}, (), (3, 1)),
    by_index: ({"w": STACK}, (), ()),
    branches: (ONE, (), ()),
    transposed: (ONE, (), ()),
    over_devices: (ONE, (), ()),
}


@functools.cache
def steps_by_hand(program, recipe):
    """Loss and gradients of three steps, and the histories after them."""
    params, _, stack = PROGRAMS[program]
    states = {name: jnp.zeros((*stack, *EMPTY.shape)) if stack else EMPTY for name in params}
    loss = lambda p, s, x: loss_of(program(partial(by_hand, recipe), p, s, x))
    step, found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), []
    for scale in SCALES:
        value, (grads, states) = step(params, states, scale * X)
        found.append((value, grads))
    read = lambda row: jfp8.scaling.read_overwritten(row)[0]
    for _ in stack:
        read = jax.vmap(read)
    is_history = lambda node: "amax_history" in node
    histories = {name: read(row) for name, row in states.items()}
    return found, jax.tree.map(lambda x: x["amax_history"], histories, is_leaf=is_history)


SCALES = (1.0, 4.0, 0.5)  # the second step is clipped by the history of the first
CASES = {
    "four layers": (four_layers, RECIPE, False),
    "mxfp8": (four_layers, jfp8.recipes.get("mxfp8"), False),
    **{program.__name__: (program, RECIPE, True) for program in list(PROGRAMS)[1:]},
}


@every_door
@pytest.mark.parametrize("case", CASES)
@pytest.mark.representative(9)
def test_losses_gradients_and_histories_are_those_of_scaled_dot_general_by_hand(case, door):
    """In NNX with an example where a parameter is stacked: nothing else tells that there."""
    program, recipe, example = CASES[case]
    params, layers, stack = PROGRAMS[program]
    states = dict.fromkeys(params, jnp.zeros((*stack, 1)))
    run = lambda p, x: program(plain, p, states, x)
    model = converted(door, run, params, X, recipe, layers=layers, exempt=(), example=example)
    expected, histories = steps_by_hand(program, recipe)
    for scale, wanted in zip(SCALES, expected, strict=True):
        found = model.step(scale * X)
        assert_same(found, wanted)
        assert all(jnp.abs(grad).max() > 0 for grad in found[1].values())
    if recipe is RECIPE:
        assert_same(model.states(), histories)
        assert moved(model) == set(params)
    # Nothing would be proven if the plain gradient were the same.
    unconverted = jax.grad(lambda p: loss_of(program(plain, p, states, SCALES[-1] * X)))(params)
    assert all((unconverted[name] != grad).any() for name, grad in found[1].items())


def next_token_loss(logits, tokens):
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("block", marks=pytest.mark.slow)])
def test_a_flax_model_has_the_bits_that_its_own_conversion_gives(recipe):
    tokens = jax.random.randint(jax.random.key(2), (4, 8), 0, 24)
    how, name = {"dtype": jnp.bfloat16}, "_overwrite_with_gradient"
    attention = nn.MultiHeadDotProductAttention(2, **how)
    model = nn.Sequential([nn.Embed(24, 32, **how), attention, nn.Dense(24, **how)])
    linen = jfp8.convert(model, recipe, state_collection=name)
    variables = linen.init(jax.random.key(0), tokens)
    params, histories = variables["params"], variables.get(name, {})

    def of_linen(params, histories, tokens):
        return next_token_loss(linen.apply({"params": params, name: histories}, tokens), tokens)

    def of_function(params, tokens):
        return next_token_loss(model.apply({"params": params}, tokens), tokens)

    function = jfp8.convert(of_function, recipe)
    state = function.init(params, tokens)
    gradient = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
    linen_step, function_step = gradient(of_linen), gradient(function)
    for _ in range(3):
        expected, (grads, histories) = linen_step(params, histories, tokens)
        value, (new, state) = function_step(params, state, tokens)
        assert value == expected
        assert_same(new, grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    paths = {
        "/".join(k.key for k in path[:-2]): x for path, x in jax.tree.leaves_with_path(histories)
    }
    assert_same({name.removesuffix("/kernel"): row for name, row in state.items()}, paths)


# The oracle: fake quantization.


def mlp(mm, p, x):
    for name in "abc":
        x = jax.nn.relu(mm(x, p[name]))
    return mm(x, p["head"])


def conv_net(mm, p, x):
    x = jax.nn.relu(mm(x, p["stem"]))
    x = jax.nn.relu(mm(x[:, ::2], p["body"]))
    return mm(x.mean((1, 2)), p["head"])


def scaled(key, shape):
    return jax.random.normal(jax.random.key(key), shape) / np.prod(shape[:-1]) ** 0.5


MLP = {name: scaled(i, (16, 16)) for i, name in enumerate("abc")} | {"head": scaled(3, (16, 3))}
CONVS = {"stem": (3, 3, 3, 8), "body": (3, 3, 8, 8), "head": (8, 3)}
CONVS = {name: scaled(i, shape) for i, (name, shape) in enumerate(CONVS.items())}
IMAGES = jax.random.normal(jax.random.key(2), (2, 6, 6, 3))
ORACLES = {"mlp": (mlp, MLP, X, "current"), "conv net": (conv_net, CONVS, IMAGES, "delayed")}


@every_door
@pytest.mark.parametrize("layers", [True, False], ids=["layers", "own"])
@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.representative(1)
def test_values_and_gradients_are_those_of_fake_quantization(name, layers, door):
    """Rounding in f32 of another order may move an operand to the next FP8 value now and then.

    Empty histories stand for current scaling.
    """
    net, params, x, recipe = ORACLES[name]
    run = lambda p, x: net(multiply, p, x)
    case = converted(door, run, params, x, recipe, layers=params if layers else (), exempt=())
    y, (_, grads) = case(x), case.step(x)
    quantized = fake(multiply)
    wanted = lambda mm: jax.jit(
        lambda p: (net(mm, p, x), jax.grad(lambda p: loss_of(net(mm, p, x)))(p))
    )(params)
    (y_oracle, oracle), (y_stock, stock) = wanted(quantized), wanted(multiply)
    assert relative_error(y, y_oracle) < 2e-3
    for name, grad in grads.items():
        assert relative_error(grad, oracle[name]) < 1e-2
        assert cosine(grad, oracle[name]) > 0.9999
    # FP8 is much further from f32 than from the oracle, or this would prove nothing.
    assert relative_error(y, y_stock) > 5 * relative_error(y, y_oracle)
    assert relative_error(grads, stock) > 5 * relative_error(grads, oracle)
    assert cosine(grads, stock) > 0.98


def ordered(p, x):
    """Three arrays of the same numbers in other orders, and one of them twice."""
    return x[::-1] @ p["w"], x[:, ::-1] @ p["w"], x @ p["w"], x @ p["k"]


@every_door
def test_one_input_is_quantized_once_and_others_are_not_taken_for_it(door):
    names = lambda p, x: four_layers(plain, p.held, dict.fromkeys(NAMES), x)
    case = converted(door, names, PARAMS, X, "delayed", layers=NAMES, exempt=(), example=False)
    program = case.compiled.lower(case.state, X).compile().as_text()
    made = set(re.findall(r"%(\S+) = f8e4m3fn\[64,16\]", program))
    assert len(made) == 2, made  # x, and what goes into the last layer
    weights = {"w": PARAMS["q"], "k": PARAMS["k"]}
    case = converted(door, ordered, weights, X, "delayed", exempt=())
    for found, expected in zip(case(X), case.plain(X), strict=True):
        assert 0 < relative_error(found, expected) < 0.06
    _, grads = case.step(X)
    assert 0 < relative_error(grads, jax.grad(lambda p: loss_of(ordered(p, X)))(weights)) < 0.1


@every_door
def test_inputs_of_one_shape_have_scales_of_their_own(door):
    """The second is a hundred times larger than the first, whose history would clip it."""
    run = lambda p, x: (100 * jnp.tanh(x @ p["q"])) @ p["k"]
    case = converted(door, run, {n: PARAMS[n] for n in "qk"}, X, "delayed", exempt=())
    for _ in range(2):
        assert 0 < relative_error(case(X), case.plain(X)) < 0.06  # roundings of up to 2^-4
        case.step(X)
    assert moved(case) == {"q", "k"}


@dataclasses.dataclass(frozen=True)
class Output:
    """A result that is no pytree."""

    logits: jax.Array
    name: str = "logits"


@every_door
def test_results_in_an_object_are_arrays(door):
    run = lambda p, x: x @ p["q"]
    in_object = lambda p, x: [Output(run(p, x)), None]
    plain, case = (converted(door, f, PARAMS, X, exempt=()) for f in (run, in_object))
    found, nothing = case(X)
    np.testing.assert_array_equal(found.logits, plain(X))
    assert (type(found), found.name, nothing) == (Output, "logits", None)


def forces(p, x):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"]))(x)


@every_door
@pytest.mark.slow
def test_a_model_that_differentiates_has_other_histories_for_its_gradients(door):
    """These are a million times smaller here, and by the scale of activations all zeros."""
    params = {"w": scaled(0, (16, 16)), "v": 1e-6 * scaled(1, (16, 1))}
    case = converted(door, forces, params, X, "delayed", exempt=())
    # NNX keeps none for those.
    names = {"w", "v", *(() if door == "nnx" else ("w_2", "v_2"))}
    assert set(case.states()) == names
    for _ in range(2):  # without histories, and with those of the first step
        assert 0 < relative_error(case(X), case.plain(X)) < 0.15  # some roundings of up to 2^-4
        case.step(X)


@every_door
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "direct_e5m2", "mxfp8", "nvfp4"])
@pytest.mark.representative(3)
def test_stored_weights_give_the_same_numbers(recipe, door):
    """They were rounded before instead of during the call: by the same rule, if it is compiled."""
    run = lambda p, x: jnp.tanh(p("q", x)) @ p["k"]
    params = {name: jnp.tile(PARAMS[name], (2, 2)) for name in "qk"}
    x = jnp.tile(X, (1, 2))
    case = converted(door, run, params, x, recipe, layers="q", exempt=())
    call = jax.jit(lambda params, x: case(x, params))
    stored = jfp8.quantize_params(params, recipe, kernels=("q", "k"))
    assert all(map(jfp8.is_scaled_array, stored.values()))
    np.testing.assert_array_equal(call(stored, x), call(params, x))
    assert 1e-3 < relative_error(call(params, x), case.plain(x)) < 0.5
    if recipe == "current":
        np.testing.assert_array_equal(call(stored, x), call(jfp8.dequantize_tree(stored), x))
        numpy = jax.tree.map(np.asarray, stored)  # and without jit
        np.testing.assert_allclose(case(np.asarray(x), numpy), call(stored, x), 1e-5, 1e-6)
        assert all(row.fp8 for row in case.report(x).rows)
        with jfp8.autocast(enabled=False):
            np.testing.assert_array_equal(case(x), case.plain(x))
            reasons = {row.reason for row in case.report(x).rows}
            assert reasons == {"FP8 is disabled in this region"}


@every_door
def test_code_that_needs_numbers_is_told(door):
    model = original(door, lambda p, x: x @ p["w"] if float(x.sum()) > 0 else x, ONE)
    calls = {"function": lambda f: f(ONE, X), "linen": lambda model: model.init(KEY, X)}
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        calls.get(door, lambda model: model(X))(jfp8.convert(model, "current", exempt=()))
    notes = str(error.value.__notes__)
    assert "traces a model or function even where it is called without" in notes
