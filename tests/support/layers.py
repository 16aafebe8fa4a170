"""The oracle of tests of layers: fake quantization in f32, with straight-through gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from support.arrays import cosine, device_normal, relative_error

KEY = jax.random.key(7)


@functools.partial(jax.jit, static_argnums=0)
def init(layer, *inputs):
    return layer.init(KEY, *inputs)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("deterministic", "mutable", "sow_weights", "capture_intermediates"),
)
def apply(layer, variables, *inputs, **options):
    """Compiled, once for equal layers: much faster than one operation at a time."""
    return layer.apply(variables, *inputs, **options)


def random_params(layer, *inputs, scale=0.4, shift=0.1):
    """Draw parameters of which none is zero or one."""
    shapes = jax.eval_shape(layer.init, KEY, *inputs)["params"]
    leaves, structure = jax.tree.flatten(shapes)
    drawn = [
        (device_normal(a.shape, i, scale) + shift).astype(a.dtype) for i, a in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, drawn)


def shapes_of(tree):
    return jax.tree.map(jnp.shape, tree)


def on_grid(x, dtype) -> jax.Array:
    """Round `x` to the grid of `dtype` that its own amax gives."""
    largest = float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x)) / largest
    scale = jnp.where(scale == 0, 1, scale)
    return jnp.clip(x / scale, -largest, largest).astype(dtype).astype(jnp.float32) * scale


def exact_product(equation, a, b):
    return jnp.einsum(equation, a, b, precision="highest")


def fake(product, of_rhs=lambda on_grid: on_grid):
    """Return a bilinear `product` of e4m3 operands, whose gradients are of these and e5m2.

    ``of_rhs`` may give parts of rhs a grid each. Further arguments have no gradient.
    """
    in_e4m3 = functools.partial(on_grid, dtype=jnp.float8_e4m3fn)

    @jax.custom_vjp
    def quantized(a, b, *others):
        return forward(a, b, *others)[0]

    def forward(a, b, *others):
        y, vjp = jax.vjp(lambda a, b: product(a, b, *others), in_e4m3(a), of_rhs(in_e4m3)(b))
        return y, (vjp, len(others) * [None])

    def backward(saved, dy):
        vjp, nothing = saved
        return *vjp(on_grid(dy, jnp.float8_e5m2)), *nothing

    quantized.defvjp(forward, backward)
    return quantized


def fake_product(equation, a, b):
    """Return an einsum of e4m3 operands, whose gradients are of these and e5m2."""
    return fake(functools.partial(exact_product, equation))(a, b)


def assert_of_rounded_operands(functions, params, inputs, dy, within=5e-3):
    """Assert that results and gradients follow from rounded operands, and not from others.

    `functions`: the tested one of parameters and inputs, the oracle, and that without rounding.
    """

    @jax.jit
    def run(params, inputs):
        results = [jax.vjp(f, params, *inputs) for f in functions]
        return [(y, vjp(dy)) for y, vjp in results]

    found, *others = run(params, inputs)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    values = [jax.tree.leaves(tree) for tree in (found, *others)]
    largest = max(float(np.abs(v).max()) for v in values[2][1:])
    told = []
    for path, y, expected, plain in zip(paths, *values, strict=True):
        assert y.shape == expected.shape, path
        if float(np.abs(plain).max()) < 1e-5 * largest:
            continue  # the bias of keys moves no weight: its gradient is rounding errors
        # Some values lie so close to the middle of two f8 numbers that f32 errors decide.
        assert relative_error(y, expected) < within, path
        assert cosine(y, expected) > 1 - within**2 / 2, path
        told.append(relative_error(plain, expected))
    assert told[0] > within / 2, "the oracle tells"
    assert max(told) > 4 * within
