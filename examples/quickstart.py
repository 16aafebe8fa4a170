"""Predict the next byte of JAX's own source code, with every matrix product in FP8."""

import pathlib

import flax.linen as nn
import jax
import numpy as np
import optax

import jfp8

files = sorted(pathlib.Path(jax.__file__).parent.rglob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
windows, rng = np.lib.stride_tricks.sliding_window_view(text, 17), np.random.default_rng(0)

flatten = lambda x: x.reshape(len(x), -1)
layers = [nn.Embed(256, 32), flatten, jfp8.Dense(256), nn.relu, jfp8.Dense(256)]
model, tx = nn.Sequential(layers), optax.chain(jfp8.loss_scale(), optax.adam(1e-3))
variables = model.init(jax.random.key(0), windows[:1, :16])
state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def loss_fn(variables, batch):
    logits = model.apply(variables, batch[:, :16])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 16]).mean(), {}


@jax.jit
def train_step(state, batch):
    loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)
    return state.apply_gradients(grads), loss


for step in range(501):
    state, loss = train_step(state, windows[rng.integers(len(windows), size=256)])
    if step % 100 == 0:
        print(f"step {step:3}   loss {loss:.3f}")
