"""Faults that users of other libraries have reported: the right value, or an error that helps."""

import io
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax import lax

import jfp8
from jfp8 import checkpoint
from support.arrays import assert_same, relative_error
from support.arrays import keyed_normal as normal

D = 16
X, W = normal(1, (8, D)), normal(2, (D, D))
MATMUL = (((1,), (0,)), ((), ()))
LARGEST = [np.max(np.abs(X)), np.max(np.abs(W))]  # the amaxes of lhs and rhs


def mean_square(y):
    return jnp.mean(y**2)


# One matmul behind three doors. A state is a pytree; a step returns the kernel's gradient and the
# next state, with the same weights.


class Function:
    """`jfp8.scaled_dot_general`, with states and sinks by the names of the weights."""

    def __init__(self):
        self.state: Any = {"w": W, "fp8": {"w": jfp8.recipes.DelayedScaling().init_state()}}

    def call(self, state, x):
        return self.multiply(state, state["w"], x, None), state

    def multiply(self, state, w, x, sink):
        return jfp8.scaled_dot_general(x, w, MATMUL, state=state["fp8"]["w"], sink=sink)

    def gradient(self, state, x):
        loss = lambda w, sink: mean_square(self.multiply(state, w, x, sink))
        return jax.grad(loss, argnums=(0, 1))(state["w"], jnp.zeros((3, 2050)))

    def after(self, state, gradient):
        return {**state, "fp8": jfp8.advance(state["fp8"], {"w": gradient[1]})}

    def step(self, state, x):
        gradient = self.gradient(state, x)
        return gradient[0], self.after(state, gradient)

    def probed(self, state):
        jfp8.report(lambda w, x: mean_square(x @ w), W, X)
        jax.eval_shape(self.call, state, X)
        return state

    def histories(self, state):
        return {role: found["amax_history"] for role, found in state["fp8"]["w"].items()}


class Linen:
    """`jfp8.TrainState` of a layer whose every call may change its collection of histories."""

    model = jfp8.Dense(D, use_bias=False, kernel_init=lambda *_: W)

    def __init__(self):
        variables = self.model.init(jax.random.key(0), X)
        self.state: Any = jfp8.TrainState.create(
            apply_fn=self.model.apply, variables=variables, tx=optax.sgd(0.0)
        )

    def call(self, state, x):
        y, mutated = self.model.apply(state.variables, x, mutable=["fp8"])
        return y, state.replace(fp8=mutated["fp8"])

    def gradient(self, state, x):
        loss = lambda variables, x: mean_square(self.model.apply(variables, x))
        return jfp8.value_and_grad(loss)(state, x)[1]

    def after(self, state, gradient):
        return state.apply_gradients(gradient)

    def step(self, state, x):
        gradient = self.gradient(state, x)
        return gradient.params["kernel"], self.after(state, gradient)

    def probed(self, state):
        self.model.tabulate(jax.random.key(0), X)
        jax.eval_shape(self.call, state, X)
        return state

    def histories(self, state):
        product = state.fp8["DotGeneral_0"]
        return {role: product[role]["amax_history"] for role in ("lhs", "rhs", "grad")}


class Nnx:
    """The state of a layer, which is merged for each call."""

    def __init__(self):
        model = jfp8.nnx.Linear(D, D, use_bias=False, kernel_init=lambda *_: W, rngs=nnx.Rngs(0))
        self.graph, self.state = nnx.split(model)

    def model(self, state):
        return nnx.merge(self.graph, state, copy=True)

    def call(self, state, x):
        model = self.model(state)
        return model(x), nnx.state(model)

    def step(self, state, x):
        model = self.model(state)
        loss = lambda model, x: mean_square(model(x))
        gradient = jfp8.nnx.value_and_grad(loss)(model, x)[1]
        return gradient["kernel"].get_value(), nnx.state(model)

    def probed(self, state):
        model = self.model(state)
        nnx.tabulate(model, X)
        nnx.eval_shape(lambda model: model(X), model)
        return nnx.state(model)

    def histories(self, state):
        return self.model(state).dot_general.histories()


@pytest.fixture(scope="module", params=[Function, Linen, Nnx])
def door(request):
    return request.param()


def in_a_student(door, state, loss):
    """Return the state of a frozen model in the loss of another, of which a gradient is taken."""

    def of_student(w):
        y, after = door.call(state, 100 * X)
        return loss(y, w), after

    return jax.grad(of_student, has_aux=True)(W)[1]


def without_a_gradient(door, state):
    """Return what is left of `state` by programs that take no gradient of its model."""
    changed = lambda state, x=100 * X: door.call(state, x)[1]
    return {
        "evaluation": changed(state),
        "warm-up": changed(state, jnp.full((1, D), 1e-3)),
        "EMA": changed(jax.tree.map(lambda a: (a + a) / 2, state)),
        "frozen": in_a_student(door, state, lambda y, w: mean_square(X @ w - y)),
        "two models": in_a_student(door, state, lambda y, w: mean_square(y @ w)),
        "cond": lax.cond(X[0, 0] < 9, changed, lambda state: state, state),
        "while": lax.fori_loop(0, 3, lambda _, state: changed(state), state),
        "tabulate, shape probe": door.probed(state),
    }


def with_a_gradient(door, state):
    """Return `state` after steps, in each of which one gradient is taken."""
    step = lambda state: door.step(state, X)[1]
    return {
        "step": step(state),
        "sampling": step(door.call(state, 100 * X)[1]),
        "cond": lax.cond(X[0, 0] < 9, step, lambda state: state, state),
        "while": lax.fori_loop(0, 1, lambda _, state: step(state), state),
    }


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_histories_move_where_a_gradient_is_taken_and_nowhere_else(door, jit):
    run = lambda programs, state: (jax.jit(programs, static_argnums=0) if jit else programs)(
        door, state
    )
    moved = {name: door.histories(s) for name, s in run(with_a_gradient, door.state).items()}
    for name, found in moved.items():
        newest = [found[role][0] for role in ("lhs", "rhs")]
        np.testing.assert_array_equal(newest, LARGEST, err_msg=name)
        assert found["grad"][0] > 0, name
        assert not any(np.any(history[1:]) for history in found.values()), name
    for state in (door.state, door.step(door.state, X)[1]):
        kept = {name: door.histories(s) for name, s in run(without_a_gradient, state).items()}
        assert_same(kept, dict.fromkeys(kept, door.histories(state)))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_histories_that_are_not_finite_are_not_read(door, bad):
    """A state went through float16: gradients of kernels were 0 for 16 steps."""
    x = 1e-4 * X  # whose gradients are zeros unless something scales them
    spoil = lambda a: a.at[1].set(bad) if a.shape == (16,) else a  # a history
    spoiled = jax.tree.map(spoil, door.step(door.state, x)[1])
    y, gradient = jax.jit(lambda state: (door.call(state, x)[0], door.step(state, x)[0]))(spoiled)
    exact = jax.grad(lambda w: mean_square(x @ w))(W)
    assert relative_error(y, x @ W) < 0.06
    assert relative_error(gradient, exact) < 0.08


@pytest.mark.parametrize("door", [Function, Linen])
def test_a_step_of_gradients_of_each_example(door):
    """As in DP-SGD: histories get the largest amax of the batch, up to the rounding of sinks."""
    door = door()

    @jax.jit
    def step(state):
        each = jax.vmap(door.gradient, in_axes=(None, 0))(state, X[:, None])
        return door.after(state, jax.tree.map(lambda g: g.mean(0), each))

    found = door.histories(step(door.state))
    for role, largest in zip(("lhs", "rhs"), LARGEST, strict=True):
        assert largest <= found[role][0] <= largest * 9 / 8
        assert not np.any(found[role][1:])


# Arrays of codes and scales.

Q = jfp8.quantize(W)
NHWC = ("NHWC", "HWIO", "NHWC")


def read_from_a_file_of_numpy():
    file = io.BytesIO()
    np.savez(file, data=np.asarray(Q.data), scale=np.asarray(Q.scale))
    file.seek(0)
    return jfp8.ScaledArray(**np.load(file))


def assign_in_nnx():
    nnx.Param(Q)[...] = W


def train_codes():
    """The kernel stood still, and only the bias was trained."""
    model = jfp8.nnx.Linear(D, D, rngs=nnx.Rngs(0))
    nnx.update(model, jfp8.quantize_params(nnx.state(model, nnx.Param)))
    optimizer = jfp8.nnx.Optimizer(model, jfp8.optim.master_weights(optax.sgd(0.1)))
    gradient = nnx.grad(lambda model: mean_square(model(X)))(model)
    optimizer.update(model, gradient)


def boxed(w):
    return nn.LogicallyPartitioned(w, ("in", "out"))


TOLD: dict[str, tuple[Any, str]] = {
    "assignment": (lambda: Q.__setitem__(0, W[0]), "New values need new scales: replace it as a"),
    "assignment in NNX": (assign_in_nnx, r"in NNX by variable.set_value\(jfp8.quantize_params"),
    "bytes without scales": (
        lambda: serialization.from_bytes({"w": Q}, serialization.to_bytes({"w": W})),
        "array of shape .16, 16., the target a ScaledArray.*then quantize these",
    ),
    "a state dict without scales": (
        lambda: serialization.from_state_dict({"w": Q}, {"w": W}),
        "array of shape .16, 16., the target a ScaledArray.*then quantize these",
    ),
    "NumPy's file": (
        lambda: read_from_a_file_of_numpy().dequantize(),
        r"\|V1 stores none of jfp8's formats.*data.view\(jnp.float8_e4m3fn\)",
    ),
    "NumPy's file in a matmul": (
        lambda: jfp8.scaled_dot_general(X, read_from_a_file_of_numpy(), MATMUL),
        "stores none of jfp8's formats",
    ),
    "codes in a matmul": (
        lambda: jfp8.scaled_dot_general(X, Q.data, MATMUL),
        "rhs is float8_e4m3fn, but FP8 data needs a scale",
    ),
    "codes in a convolution": (
        lambda: jfp8.scaled_conv_general_dilated(
            Q.data.reshape(1, 8, 8, 4),
            W.reshape(1, 1, 4, 64),
            (1, 1),
            "SAME",
            dimension_numbers=NHWC,
        ),
        "lhs is float8_e4m3fn, but FP8 data needs a scale",
    ),
    "codes in a grouped matmul": (
        lambda: jfp8.scaled_ragged_dot(Q.data, W.reshape(1, D, D), jnp.array([D])),
        "lhs is float8_e4m3fn, but FP8 data needs a scale",
    ),
    "codes in attention": (
        lambda: jfp8.scaled_dot_product_attention(*3 * [Q.data.reshape(1, 4, 4, 16)]),
        "query is float8_e4m3fn, but FP8 data needs a scale",
    ),
    "codes in Linen": (
        lambda: jfp8.Dense(D).init(jax.random.key(0), Q.data),
        "inputs is float8_e4m3fn, but FP8 data needs a scale",
    ),
    "codes in NNX": (
        lambda: jfp8.nnx.Linear(D, D, rngs=nnx.Rngs(0))(Q.data),
        "inputs is float8_e4m3fn, but FP8 data needs a scale",
    ),
    "a box": (
        lambda: jfp8.quantize_params({"a": {"kernel": boxed(W)}, "b": {"kernel": W}}),
        r"kernel in a LogicallyPartitioned.*flax.linen.meta.unbox\(params\)",
    ),
    "gradients of codes": (
        train_codes,
        "master_weights got gradients of codes and scales.*by jfp8.value_and_grad, or jfp8.nnx",
    ),
    "a sink without its name": (
        lambda: jfp8.advance(Function().state["fp8"], jnp.zeros((3, 2050))),
        r"sink_cotangent has \['an array'\] at the top.*it has \['w'\]",
    ),
}


@pytest.mark.parametrize(("call", "message"), TOLD.values(), ids=TOLD)
def test_mistakes_are_told_with_their_cure(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_quantized_parameters_take_boxes_that_were_removed():
    q = jfp8.quantize_params(nn.meta.unbox({"a": {"kernel": boxed(W)}, "b": {"kernel": W}}))
    assert_same(q["a"], q["b"])


STACK = np.stack([W, 1e-4 * W, 1e4 * W])


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_a_stack_with_one_scale_is_told_and_with_a_scale_each_is_right(recipe):
    """Slices of 1e-4 were zeros next to slices of 1e4."""
    params = {"layers": {"kernel": STACK}}
    with pytest.warns(UserWarning, match="1 of the 3 slices .* pass stacked='layers'"):
        jfp8.quantize_params(params, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = jfp8.quantize_params(params, recipe, stacked="layers")["layers"]["kernel"]
        for near in (STACK * np.float32([1, 1e4, 1e-2])[:, None, None], 0 * STACK):
            jfp8.quantize_params({"kernel": near}, recipe)
    for found, exact in zip(q.dequantize(), STACK, strict=True):
        assert relative_error(found, exact) < 0.04


def test_a_stack_of_experts_without_a_layout_is_named():
    tensors = {"experts.up": STACK, "experts.up_bias": STACK[0], "down.weight": np.asarray(W)}
    stream = checkpoint.serving_tensors(tensors, "compressed-tensors", recipe="rowwise")
    with pytest.warns(UserWarning, match="stack 'experts.up', .* stays in float32"):
        config = stream.config()
    assert config["ignore"] == ["experts.up", "lm_head"]


def test_a_stack_with_one_scale_is_stored_with_it(tmp_path):
    one = jfp8.quantize(STACK)
    checkpoint.save_fp8_safetensors(tmp_path, {"up.weight": one}, "per-tensor")
    assert_same(checkpoint.load_fp8_safetensors(tmp_path)[0]["up.weight"], jax.device_get(one))
    each = jax.vmap(jfp8.quantize)(STACK)  # scales that f32 alone holds
    several = jfp8.ScaledArray(each.data, each.scale.reshape(3, 1, 1))
    with pytest.raises(ValueError, match="'up.weight'.* cannot be stored in this style"):
        checkpoint.save_fp8_safetensors(tmp_path / "b", {"up.weight": several}, "per-tensor")


def test_a_file_with_codes_of_another_format_is_told_of_the_dtype(tmp_path):
    checkpoint.save_fp8_safetensors(tmp_path, {"up.weight": Q}, "per-tensor")
    (file,) = tmp_path.glob("*.safetensors")
    stored = dict(checkpoint.load(file))
    stored["up.weight"] = np.asarray(stored["up.weight"]).view(ml_dtypes.float8_e5m2)
    checkpoint.save(file, stored)
    with pytest.raises(ValueError, match=r"float8_e5m2.* fp8-tensor need float8_e4m3fn and a"):
        checkpoint.load_fp8_safetensors(tmp_path)
