"""`jfp8.convert` of functions, against the same ones with `scaled_dot_general` written by hand."""

import functools
import warnings

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jfp8
from support.arrays import relative_error
from support.models import Model

RECIPE = jfp8.recipes.DelayedScaling(amax_history_len=4)
EMPTY = jfp8.scaling.init_overwritten(RECIPE.init_state())
X = jax.random.normal(jax.random.key(0), (8, 16))
STACK = jax.random.normal(jax.random.key(1), (3, 16, 16)) / 3


def by_hand(x, w, variable):
    state, sink = jfp8.scaling.read_overwritten(variable, RECIPE.init_state())
    numbers = (((1,), (0,)), ((), ()))
    return jfp8.scaled_dot_general(x, w, numbers, recipe=RECIPE, state=state, sink=sink)


def plain(x, w, variable):
    return x @ w


def used_twice(mm, p, s, x):
    return jnp.tanh(mm(jnp.tanh(mm(x, p, s)), p, s))


def scan_over_stack(mm, p, s, x):
    def body(h, a):
        return jnp.tanh(mm(h, *a)), h.sum()

    h, sums = lax.scan(jax.checkpoint(body), x, (p, s))
    return h + sums.sum()


def loop_in_loop(mm, p, s, x):
    inner = lambda h, a: (jnp.tanh(mm(h, *a)), None)
    outer = lambda h, _: (lax.scan(inner, h, (p, s))[0], None)
    return lax.scan(outer, x, None, length=2)[0]


def stack_of_stacks(mm, p, s, x):
    inner = lambda h, a: (jnp.tanh(mm(h, *a)), None)
    outer = lambda h, a: (lax.scan(inner, h, a)[0], None)
    return lax.scan(outer, x, (p[:, None], s))[0]


def branches(mm, p, s, x):
    return lax.cond(x.sum() > -1e9, lambda x: jnp.tanh(mm(x, p, s)), lambda x: x, x)


def transposed(mm, p, s, x):
    if mm is plain:
        return jnp.sin(jnp.einsum("oi,bi->ob", p.T, x)).T
    return jnp.sin(mm(x, p, s))


def over_devices(mm, p, s, x):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=auto)
    specs = jax.P(), jax.P(), jax.P("d")
    run = lambda p, s, x: jax.jit(jnp.tanh)(mm(x, p, s))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))(p, s, x)


PROGRAMS = {
    used_twice: (STACK[0], ()),
    scan_over_stack: (STACK, (3,)),
    loop_in_loop: (STACK, (3,)),
    stack_of_stacks: (STACK, (3, 1)),
    branches: (STACK[0], ()),
    transposed: (STACK[0], ()),
    over_devices: (STACK[0], ()),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.representative(2)
def test_gradients_and_histories_are_those_of_scaled_dot_general_by_hand(program):
    weight, lead = PROGRAMS[program]
    loss = lambda mm, p, s, x: jnp.sum(program(mm, p, s, x) ** 2)
    without_state = jnp.zeros((*lead, *EMPTY.shape)) if lead else EMPTY
    converted = jfp8.convert(lambda p, x: loss(plain, p, without_state, x), RECIPE, exempt=())
    state = converted.init(jax.eval_shape(lambda: weight), X)
    assert jax.tree.map(jnp.shape, state) == {"p": (*lead, *EMPTY.shape)}
    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1))
    ours, theirs = jax.jit(gradient(converted)), jax.jit(gradient(functools.partial(loss, by_hand)))
    by_name, alone = (weight, state), (weight, without_state)
    for _ in range(3):
        value, (grad, new) = ours(*by_name, X)
        expected, (expected_grad, expected_new) = theirs(*alone, X)
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(grad, expected_grad)
        assert jnp.abs(grad).max() > 0
        by_name, alone = (weight - 0.01 * grad, new), (weight - 0.01 * grad, expected_new)
        weight = by_name[0]
    rows = new["p"].reshape(-1, EMPTY.size), expected_new.reshape(-1, EMPTY.size)
    read = jax.vmap(lambda row: jfp8.scaling.read_overwritten(row)[0])
    jax.tree.map(np.testing.assert_array_equal, *map(read, rows))
    assert all(jnp.all(x["amax_history"][:, :3] > 0) for x in read(rows[0]).values())


def transformer(module, tokens):
    """A small one in bf16, as Flax users write it."""
    x = nn.Embed(24, 32, dtype=jnp.bfloat16)(tokens)
    mask = nn.make_causal_mask(tokens)
    x = x + nn.MultiHeadDotProductAttention(2, dtype=jnp.bfloat16)(x, mask=mask)
    x = x + nn.Dense(32, dtype=jnp.bfloat16)(nn.gelu(nn.Dense(64, dtype=jnp.bfloat16)(x)))
    return nn.Dense(24, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x))


def next_token_loss(logits, tokens):
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("block", marks=pytest.mark.slow)])
def test_a_flax_model_has_the_bits_that_its_own_conversion_gives(recipe):
    tokens = jax.random.randint(jax.random.key(2), (4, 8), 0, 24)
    model, name = Model(transformer), "_overwrite_with_gradient"
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
        jax.tree.map(np.testing.assert_array_equal, new, grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    paths = {
        "/".join(k.key for k in path[:-2]): x for path, x in jax.tree.leaves_with_path(histories)
    }
    assert {name.removesuffix("/kernel") for name in state} == set(paths)
    for name, row in state.items():
        np.testing.assert_array_equal(row, paths[name.removesuffix("/kernel")])


def conv_net(params, images, labels):
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = functools.partial(lax.conv_general_dilated, padding="SAME", dimension_numbers=numbers)
    x = jax.nn.relu(conv(images, params["stem"], (1, 1)))
    x = jax.nn.relu(conv(x, params["conv"], (2, 2)))
    rows = x.reshape(-1, x.shape[-1])
    sizes = jnp.array([len(rows) // 2, len(rows) - len(rows) // 2])
    x = jax.nn.relu(lax.ragged_dot(rows, params["experts"], sizes))
    logits = x.reshape(len(images), -1, 8).mean(1) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


def conv_params():
    shapes = {"stem": (3, 3, 3, 8), "conv": (3, 3, 8, 8), "experts": (2, 8, 8), "head": (8, 5)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scaled = lambda key, shape: jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))
    return {name: scaled(key, shape) for key, (name, shape) in zip(keys, shapes.items())}


def test_convolutions_and_ragged_products_with_aux_and_the_edges():
    params, images = conv_params(), jax.random.normal(jax.random.key(1), (4, 6, 6, 3))
    labels = jnp.arange(4)
    converted = jfp8.convert(conv_net, RECIPE)
    state = converted.init(params, images, labels)
    assert set(state) == {"conv", "experts"}  # the first convolution and the logits are edges
    step = jax.jit(jax.value_and_grad(converted, argnums=(0, 1), has_aux=True))
    (loss, logits), (grads, state) = step(params, state, images, labels)
    high = jax.jit(jax.value_and_grad(conv_net, has_aux=True))
    (exact, _), exact_grads = high(params, images, labels)
    assert logits.shape == (4, 5)
    assert loss != exact
    np.testing.assert_allclose(loss, exact, rtol=0.02)
    for name, grad in grads.items():
        cosine = jnp.vdot(grad, exact_grads[name]) / jnp.linalg.norm(grad.ravel())
        assert cosine / jnp.linalg.norm(exact_grads[name].ravel()) > 0.97  # of e5m2: 2 bits
    amaxes = {
        k: jfp8.scaling.read_overwritten(v)[0]["rhs"]["amax_history"][0] for k, v in state.items()
    }
    assert amaxes == {k: jnp.abs(params[k]).max() for k in state}
    report = jfp8.report(converted, params, state, images, labels)
    fp8 = {(row.path, row.kind) for row in report.rows if row.fp8}
    kinds = ("fprop", "dgrad", "wgrad")
    assert {("conv", kind) for kind in kinds} <= fp8
    assert {row.path for row in report.unconverted} == {"stem", "head"}
    assert "final logits" in str(report)


def test_names_do_not_depend_on_the_batch_and_patterns_match_them():
    def loss(params, x):
        heads = jnp.concatenate([params["q"], params["k"]], axis=1).astype(jnp.bfloat16)
        q, k = jnp.split(x.astype(jnp.bfloat16) @ heads, 2, axis=1)
        for i in range(2):
            x = jnp.tanh(x @ params["layers"][i])
        return jnp.sum(q * k) + jnp.sum(jnp.take(params["embed"], jnp.arange(3), axis=0) @ x[:3].T)

    params = {"q": STACK[0], "k": STACK[1], "layers": STACK[:2], "embed": STACK[2]}
    names = [*jfp8.convert(loss, RECIPE, exempt=()).init(params, X)]
    assert names == ["q+k", "layers", "layers_2", "embed"]
    assert names == [*jfp8.convert(loss, RECIPE, exempt=()).init(params, X[:5])]
    only = jfp8.convert(loss, {"layers*": RECIPE, "*": None}, exempt="layers_2")
    assert [*only.init(params, X)] == ["layers"]
    with pytest.raises(ValueError, match="matches no layer of the model. Layers: embed, layers"):
        jfp8.convert(loss, RECIPE, exempt="decoder/*").init(params, X)


def test_recipes_without_state_keep_the_signature_and_attention_is_asked_for():
    def loss(w, x):
        q = jnp.tanh(x @ w)
        return jnp.sum(jax.nn.softmax(q @ q.T) @ x)

    converted = jfp8.convert(loss, "current", exempt=())
    assert converted.init(STACK[0], X) == {}
    value, exact = converted(STACK[0], X), loss(STACK[0], X)
    assert value == converted(STACK[0], converted.init(STACK[0], X), X) != exact
    # Compiled, the softmax is rounded in another order.
    compiled = jax.jit(converted)(STACK[0], X)
    assert relative_error(compiled, value) < 1e-6 < relative_error(value, exact)
    with jfp8.autocast(enabled=False):
        assert converted(STACK[0], X) == exact
    rows = lambda f: [
        row.fp8 for row in jfp8.report(f, STACK[0], X).rows if row.kind in ("fprop", "forward")
    ]
    assert rows(converted) == [True, False, False]
    assert rows(jfp8.convert(loss, "current", exempt=(), attention=True)) == [True, True, True]


def test_mistakes_are_told():
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    converted = jfp8.convert(loss, RECIPE, exempt=())
    state = converted.init(STACK[0], X)
    other = jfp8.convert(loss, "delayed", exempt=()).init(STACK[0], X)  # with 16 steps
    two = {"a/b": STACK[0], "a": {"b": STACK[1]}}
    for message, args in (
        (r"argument 1 must be the state; got .*f.init\(params, batch", (STACK[0], X)),
        (r"lacks \['w'\], and has \['v'\]", (STACK[0], {"v": state["w"]}, X)),
        (r"has shape \(7638,\); \(6522,\) is needed", (STACK[0], other, X)),
        ("Two weights have the path 'a/b'", (two, state, X)),
    ):
        with pytest.raises(ValueError, match=message):
            converted(*args)
    with pytest.raises(TypeError, match="weights are argument 0"):
        converted(w=STACK[0], x=X)
    for message, function, options in (
        ("weights=-1: must be the position", loss, {"weights": -1}),
        ("weights=0 is for functions", nn.Dense(4), {"weights": 0}),
        ("holds its weights itself", functools.partial(loss, STACK[0]), {}),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            jfp8.convert(function, RECIPE, **options)
    with pytest.warns(UserWarning, match="but not to its sink.*the state of a converted function"):
        jax.jit(jax.grad(converted))(STACK[0], state, X)
    with pytest.warns(UserWarning, match="No matmul of <lambda> is FP8.*final logits"):
        jfp8.convert(loss, "current")(STACK[0], X)
    with pytest.warns(UserWarning, match="none with an operand made of the weights, argument 1"):
        jfp8.convert(lambda w, x: jnp.sum(w) + jnp.sum(x), "current", weights=1)(STACK[0], X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(STACK[0], state, X)
        jax.jit(jax.grad(converted, argnums=(0, 1)))(STACK[0], state, X)


def test_functions_with_derivatives_of_their_own_are_left_alone_and_said():
    @jax.custom_vjp
    def clipped(w, x):
        return x @ w

    clipped.defvjp(lambda w, x: (x @ w, (w, x)), lambda res, g: (res[1].T @ g, g @ res[0].T))
    loss = lambda p, x: jnp.sum(jnp.tanh(clipped(p["a"], x) @ p["b"]) ** 2)
    params = {"a": STACK[0], "b": STACK[1]}
    converted = jfp8.convert(loss, "current", exempt=())
    report = jfp8.report(converted, params, X)
    assert "inside custom_vjp_call, which has a derivative of its own" in str(report)
    assert {row.path for row in report.rows if row.fp8} == {"b"}


def test_weights_that_the_function_holds_are_told():
    held = jax.random.normal(jax.random.key(3), (8, 4))
    batch = jnp.ones((2, 8))
    model = jfp8.convert(lambda x: jnp.sum(x @ held), "current", exempt=())
    with pytest.warns(UserWarning, match="argument 0 by arrays that it holds itself.*as an arg"):
        jax.grad(model)(batch)
    table = jfp8.convert(lambda w, x: x @ w + held.T @ w, "current", exempt=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table(jnp.ones((8, 8)), jnp.ones((4, 8)))


def test_only_a_state_is_taken_for_one():
    """An empty dict, or one of the function's own, is an argument like any other."""
    predict = lambda params, options, x: options.get("by", 1.0) * jnp.tanh(x @ params)
    converted = jfp8.convert(predict, "current", exempt=())
    for options in ({}, {"by": jnp.float32(3.0)}):
        exact = predict(STACK[0], options, X)
        assert 0 < relative_error(converted(STACK[0], options, X), exact) < 0.1
    delayed = jfp8.convert(predict, RECIPE, exempt=())
    state = delayed.init(STACK[0], {}, X)
    y = delayed(STACK[0], state, {"by": 2.0}, X)
    assert (y == delayed(STACK[0], {"by": 2.0}, X, fp8_state=state)).all()
    restored = dict(state)  # as a checkpoint gives it back
    assert (y == delayed(STACK[0], restored, {"by": 2.0}, X)).all()
    tree = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    assert type(tree) is type(state)


WEIGHTS = {
    "a number times it": lambda w, x: x @ (2 * w),
    "tanh": lambda w, x: x @ jnp.tanh(w),
    "normalized": lambda w, x: x @ (w / jnp.linalg.norm(w, axis=0, keepdims=True)),
    "merged": lambda w, x: x @ (w + 0.1 * w[:, :2] @ w[:2]),
    "looked up": lambda w, x: jnp.einsum("bi,bio->bo", x, w[None][jnp.zeros(len(x), int)]),
}
NO_WEIGHTS = {
    "of data": lambda w, x: x @ (w * x[:1]),
    "dropped": lambda w, x: x @ jnp.where(x[:1] > 0, w, 0),
    "low rank": lambda w, x: (x @ w[:, :2]) @ w[:2],
}


@pytest.mark.parametrize("name", [*WEIGHTS, *NO_WEIGHTS])
def test_a_weight_is_what_was_computed_of_weights_alone(name):
    function = {**WEIGHTS, **NO_WEIGHTS}[name]
    loss = lambda w, x: jnp.sum(jnp.tanh(function(w, x)) ** 2)
    rows = jfp8.report(jfp8.convert(loss, "current", exempt=jfp8.Edge.LOW_RANK), STACK[0], X).rows
    fp8 = [row.fp8 for row in rows if row.kind in ("fprop", "forward") and row.out == "f32[8,16]"]
    assert fp8[-1:] == [name in WEIGHTS]


def test_code_that_needs_numbers_is_told():
    def loss(w, x):
        return jnp.sum(x @ w) if float(x.sum()) > 0 else jnp.sum(x)

    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        jfp8.convert(loss, "current", exempt=())(STACK[0], X)
    assert "traces a model or function even where it is called without" in str(
        error.value.__notes__
    )


@pytest.mark.parametrize("version", ["remat2", "remat3"])
def test_checkpoints_of_both_versions_are_entered(version):
    block = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))
    logits = lambda p, x: block(p["w"], x) @ p["head"]
    loss = jfp8.convert(lambda p, x: jnp.sum(logits(p, x) ** 2), "current")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", version == "remat3")
    try:
        rows = jfp8.report(loss, {"w": STACK[0], "head": STACK[1]}, X).rows
    finally:
        jax.config.update("jax_remat3", before)
    assert {row.kind for row in rows if row.path == "w"} == {"fprop", "dgrad", "wgrad"}
    assert {row.path for row in rows if not row.fp8} == {"head"}  # the logits
