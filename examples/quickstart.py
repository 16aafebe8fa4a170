"""Train in FP8 and in float32, side by side, to predict the next byte of JAX's source code."""

import pathlib

import flax.linen as nn
import jax
import numpy as np
import optax

import jfp8

files = sorted(pathlib.Path(jax.__file__).parent.rglob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
windows, rng = np.lib.stride_tricks.sliding_window_view(text, 17), np.random.default_rng(0)


def make(dense):
    layers = [nn.Embed(256, 32), lambda x: x.reshape(len(x), -1), dense(256), nn.relu, dense(256)]
    model = nn.Sequential(layers)
    variables = model.init(jax.random.key(0), windows[:1, :16])
    tx = optax.adam(1e-3)
    return model, jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


@jax.jit
def train_step(state, batch):
    def loss_fn(variables, batch):
        logits = state.apply_fn(variables, batch[:, :16])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 16]).mean()

    loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)
    return state.apply_gradients(grads), loss


(model, fp8), (_, f32) = make(jfp8.Dense), make(nn.Dense)  # the same initial parameters
print(jfp8.report(model, fp8.variables, windows[:256, :16]))  # the FP8 matmuls
print("compiling ...")
losses, again = [], f32  # `again` takes other batches, to show how much runs differ
for step in range(501):
    batch, other = (windows[rng.integers(len(windows), size=256)] for _ in range(2))
    (fp8, a), (f32, b) = train_step(fp8, batch), train_step(f32, batch)
    again, c = train_step(again, other)
    losses.append((a, b, c))
    if step % 100 == 0:
        print(f"step {step:3}   loss {a:.3f} in FP8, {b:.3f} in float32")
a, b, c = np.mean(losses[-100:], axis=0)
print(
    f"mean of the last 100 steps: {a:.3f} in FP8, {b:.3f} in float32, {100 * (a / b - 1):+.2f} %;"
)
print(f"float32 on other batches: {100 * (c / b - 1):+.2f} %, so a smaller gap shows nothing")
