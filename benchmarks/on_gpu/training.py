"""Forward and backward: a linear layer, and a step of a Transformer block as wide as a 7B model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import jfp8
from jfp8.scaling.sink import init_sink
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.harness import running
from on_gpu.products import flax_op
from on_gpu.records import Record
from on_gpu.shapes import Shape, name_of, shapes
from on_gpu.timing import chained, copies, described, random, save

NN = (((1,), (0,)), ((), ()))  # y[i, j] = sum_k x[i, k] w[k, j]

# Bytes of memory traffic for each element of x, w and the gradient, at least: what one pass over
# them takes to quantize them in both directions, and a pass before it for their amax.
QUANTIZE_BYTES = {"delayed": 4.0, "current": 6.0, "rowwise": 6.0, "block": 4.06, "mxfp8": 4.06}


# Linear.


def linear(settings: Settings) -> Iterator[Group]:
    """Section: ``y = x w``, dx and dw from x, w and dy, all in bf16."""
    large = shapes(settings)
    small = [] if settings.smoke else [(n, n, n) for n in (1024, 2048)]
    for shape in (*large, *small):
        yield Group(name_of(shape), list(_linear_cases(shape, settings)), "bf16")


def _linear_cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    m, n, k = shape
    flops, elements = 6 * m * n * k, m * k + k * n + m * n

    def make(seed: int) -> tuple[jax.Array, ...]:
        sizes = ((m, k), (k, n), (m, n))
        return tuple(random(s, jnp.bfloat16, seed=3 * seed + i) for i, s in enumerate(sizes))

    inputs = copies(make, settings)

    def case(
        name: str,
        function: Callable[..., Any],
        extra: Callable[[], tuple[Any, ...]],
        work: Record,
        kernels: tuple[str, ...] = (),
    ) -> Case:
        def prepare() -> Timed:
            arguments = [(*i, *extra()) for i in inputs()]
            label = f"linear-{name_of(shape)}-{name}"
            calls = 12 if m * n * k <= 4096**3 else 6
            return chained(function, arguments, settings, calls=calls, name=label, **work)

        return Case(name, prepare, kernels)

    yield case("bf16", _bf16_linear, tuple, {"flops_bf16": flops})
    compared = _LINEARS if shape == (8192, 8192, 8192) else _LINEARS[:4]
    for recipe, implementation in _SMOKE_LINEARS if settings.smoke else compared:
        bytes_per_element = QUANTIZE_BYTES.get(recipe, QUANTIZE_BYTES["delayed"])
        work = {"flops_f8": flops, "bytes": int(bytes_per_element * elements)}
        if recipe.startswith("Flax"):
            op = recipe.removeprefix("Flax ")
            function = functools.partial(_flax_linear, op=op)
            yield case(recipe, function, functools.partial(_flax_state_of, op), work)
        else:
            name = f"{recipe} {implementation or ''}".strip()
            options = {"recipe": recipe, "implementation": implementation}
            function = functools.partial(_fp8_linear, **options)
            kernels = () if implementation == "xla" else _KERNELS.get(recipe, ())
            yield case(name, function, functools.partial(_state_of, recipe), work, kernels)


# Recipe, or Flax's operation, and implementation: None is what whoever does not ask gets.
_LINEARS: list[tuple[str, str | None]] = [
    ("delayed", None),
    ("current", None),
    ("block", None),
    ("rowwise", None),
    ("delayed", "xla"),
    ("delayed", "mosaic_gpu"),
    ("Flax Fp8DirectDotGeneralOp", None),
    ("mxfp8", None),
    ("Flax Fp8DotGeneralOp", None),
    ("current", "xla"),
    ("current", "mosaic_gpu"),
]
_SMOKE_LINEARS = [
    ("delayed", None),
    ("delayed", "mosaic_gpu"),
    ("Flax Fp8DirectDotGeneralOp", None),
]
# Kernels of the default implementation of a recipe on Hopper.
_KERNELS = {
    "delayed": ("quantize_tensor", "tensor_amax", "matmul"),
    "current": ("quantize_tensor", "matmul"),
    "rowwise": ("quantize_lines", "row_and_column_amax", "matmul"),
    "block": ("quantize_rows_in_blocks", "quantize_tiles", "block_matmul"),
}


def _bf16_linear(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    def product(x, w):
        return jax.lax.dot_general(x, w, NN, preferred_element_type=jnp.bfloat16)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def _state_of(recipe: str) -> tuple[Any, Any]:
    """The state in the middle of training: histories of data as in `linear`, and a sink."""
    state = jfp8.recipes.get(recipe).init_state()
    return jax.tree.map(lambda history: history + 5.0, state), init_sink()


def _fp8_linear(
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    state: Any,
    sink: jax.Array,
    *,
    recipe: str,
    implementation: Any,
) -> Any:
    def product(x, w, sink):
        return jfp8.scaled_dot_general(
            x,
            w,
            NN,
            recipe=jfp8.recipes.get(recipe),
            state=state,
            sink=None if state is None else sink,
            implementation=implementation,
        )

    y, vjp = jax.vjp(product, x, w, sink)
    return y, *vjp(dy)


def _flax_state_of(op: str) -> tuple[Any]:
    x = jnp.ones((16, 16), jnp.bfloat16)
    return (flax_op(op).init(jax.random.key(0), x, x, NN),)


def _flax_linear(x: jax.Array, w: jax.Array, dy: jax.Array, state: Any, *, op: str) -> Any:
    module = flax_op(op)
    y, vjp = jax.vjp(lambda x, w, state: module.apply(state, x, w, NN), x, w, state)
    return y, *vjp(dy)


# A Transformer block.


class Block(nn.Module):
    """Attention and a gated MLP, both behind a normalization and with residuals, as in Llama.

    Attributes:
      dense: makes a layer from its number of features and its name.
      attention: implementation of ``jax.nn.dot_product_attention``.
    """

    width: int
    mlp: int
    heads: int
    dense: Callable[..., nn.Module]
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
        *leading, _ = x.shape
        qkv = self.dense(3 * self.width, name="qkv")(norm(name="attention_norm")(x))
        q, k, v = jnp.split(qkv.reshape(*leading, self.heads, -1), 3, axis=-1)
        how: dict[str, Any] = {"is_causal": True, "implementation": self.attention}
        y = jax.nn.dot_product_attention(q, k, v, **how)
        x = x + self.dense(self.width, name="out")(y.reshape(x.shape))
        gate, up = jnp.split(
            self.dense(2 * self.mlp, name="wi")(norm(name="mlp_norm")(x)), 2, axis=-1
        )
        return x + self.dense(self.width, name="wo")(jax.nn.silu(gate) * up)


def sizes(settings: Settings) -> Record:
    if settings.smoke:
        return {"width": 64, "mlp": 128, "heads": 2, "batch": 2, "length": 32}
    return {"width": 4096, "mlp": 11008, "heads": 32, "batch": 4, "length": 2048}


def block(settings: Settings) -> Iterator[Group]:
    """Section: forward, backward and AdamW of a block."""
    yield Group(_block_name(settings), list(_block_cases(settings)), "bf16")


def _block_name(settings: Settings) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes(settings).items())


VARIANTS: dict[str, tuple[str, Any]] = {
    "bf16": ("plain", None),
    "delayed": ("jfp8", "delayed"),
    "current": ("jfp8", "current"),
    "block": ("jfp8", "block"),
    "rowwise": ("jfp8", "rowwise"),
    "Flax Fp8DirectDotGeneralOp": ("flax", "Fp8DirectDotGeneralOp"),
    "mxfp8": ("jfp8", "mxfp8"),
    "Flax Fp8DotGeneralOp": ("flax", "Fp8DotGeneralOp"),
}
_SMOKE_VARIANTS = ("bf16", "delayed", "Flax Fp8DirectDotGeneralOp")


def _variants(settings: Settings) -> list[str]:
    return [name for name in VARIANTS if not settings.smoke or name in _SMOKE_VARIANTS]


def _block_cases(settings: Settings) -> Iterator[Case]:
    for name in _variants(settings):
        kernels = _KERNELS.get(VARIANTS[name][1] or "", ())
        yield Case(name, functools.partial(_block_step, name, settings), kernels)


def _block_work(name: str, settings: Settings) -> Record:
    """Operations and bytes that the step takes at least, for `Timed.facts`."""
    s = sizes(settings)
    width, mlp, tokens = s["width"], s["mlp"], s["batch"] * s["length"]
    weights = 4 * width**2 + 3 * width * mlp
    products = 6 * weights * tokens
    # Two products, causal, and 2.5 times as much backward, where scores are recomputed.
    attention = 3.5 * 2 * s["batch"] * s["length"] ** 2 * width
    # AdamW in f32: gradient read, parameter and two moments read and written.
    traffic = 28 * weights
    if name == "bf16":
        return {"flops_bf16": int(products + attention), "bytes": traffic}
    kind, recipe = VARIANTS[name]
    per_element = QUANTIZE_BYTES[recipe if kind == "jfp8" else "delayed"]
    # The inputs and the gradients of outputs of the four layers, and their weights.
    activations = tokens * ((width + 3 * width) + 2 * width + (width + 2 * mlp) + (mlp + width))
    quantize = per_element * (weights + activations)
    work = {"flops_f8": products, "bytes": int(traffic + quantize)}
    return {**work, "flops_bf16": int(attention)}


@functools.cache
def _compiled_block(name: str, settings: Settings) -> tuple[Any, Any, jax.Array]:
    """The compiled step, its first state, and a batch."""
    s = sizes(settings)
    kind, what = VARIANTS[name]
    if kind == "jfp8":
        recipe = jfp8.recipes.get(what)
        dense = functools.partial(jfp8.Dense, recipe=recipe)
    elif kind == "flax":
        dense = functools.partial(nn.Dense, dot_general_cls=functools.partial(flax_op, what))
    else:
        dense = nn.Dense
    dense = functools.partial(dense, use_bias=False, dtype=jnp.bfloat16)
    model = Block(s["width"], s["mlp"], s["heads"], dense, _attention(settings))
    batch = random((s["batch"], s["length"], s["width"]), jnp.bfloat16)
    variables = jax.jit(model.init)(jax.random.key(0), batch)
    tx = optax.adamw(1e-4)

    def loss_of(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    if kind == "jfp8":
        state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

        def step(state, x):
            loss, grads = jfp8.value_and_grad(lambda v, x: (loss_of(v, x), {}))(state, x)
            return state.apply_gradients(grads), loss
    else:
        # All collections, since Flax hands out the state of its FP8 operations as gradients.
        params = dict(variables) if len(variables) > 1 else variables["params"]
        pack = (lambda p: p) if len(variables) > 1 else (lambda p: {"params": p})
        state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        def step(state, x):
            loss, grads = jax.value_and_grad(lambda p: loss_of(pack(p), x))(state.params)
            return state.apply_gradients(grads=grads), loss

    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    if settings.hlo:
        save(compiled, settings.hlo, f"block-{name}")
    return compiled, state, batch


@functools.cache
def _attention(settings: Settings) -> str:
    """``"cudnn"`` where that compiles for a block's sizes, else ``"xla"``."""
    if settings.smoke:
        return "xla"
    s = sizes(settings)
    shape = (s["batch"], s["length"], s["heads"], s["width"] // s["heads"])
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def attend(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    try:
        jax.jit(jax.grad(attend, argnums=(0, 1, 2))).lower(q, q, q).compile()
    except Exception as error:  # whatever cuDNN, or its absence, raises
        print(f"Attention without cuDNN: {error}", flush=True)
        return "xla"
    return "cudnn"


def _block_step(name: str, settings: Settings) -> Timed:
    compiled, state, batch = _compiled_block(name, settings)
    latest = [jax.tree.map(jnp.copy, state)]  # donated to each step in turn

    def run(steps: int) -> jax.Array:
        for _ in range(steps):
            latest[0], loss = compiled(latest[0], batch)
        return loss

    running()
    loss = float(jax.block_until_ready(run(1)))
    if not math.isfinite(loss):
        raise AssertionError(f"the loss is {loss}")
    facts = {
        "program": described(compiled),
        "attention": _attention(settings),
        "first_loss": loss,
        **_block_work(name, settings),
    }
    if settings.smoke:
        return Timed(functools.partial(run, 1), 1, facts)
    return Timed(functools.partial(run, 2), 2, facts, functools.partial(run, 1), 1)


# Memory.


def memory(settings: Settings) -> Iterator[Group]:
    """Section: what the compiler plans for a block's step, and the most the device has held."""

    def planned(name: str) -> Record:
        compiled, _, _ = _compiled_block(name, settings)
        return {"memory": described(compiled)["memory"]}

    def held() -> Record:
        stats = jax.devices()[0].memory_stats() or {}
        return {"device": {k: v for k, v in stats.items() if "bytes" in k}}

    cases = [Case(name, functools.partial(planned, name)) for name in _variants(settings)]
    cases.append(Case("device, all of this process", held))
    yield Group(_block_name(settings), cases)
