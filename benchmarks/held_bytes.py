"""Count the bytes that a training step holds, from programs compiled for an H200 that is not there.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python benchmarks/held_bytes.py
    ... benchmarks/held_bytes.py --layers 1 --recipes bf16 delayed --policies none

Needs what `.ci/compile_for_gpus` installs, and no GPU. The model is written in Flax, has
Llama-like layers of width 4096 in ``nn.scan``, and is converted. A step has 8,192 tokens, and AdamW
in float32. The table has what XLA allocates besides weights, optimizer states and the batch.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import jfp8

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from gpu_programs import compile_divided, device_of, why_not
from support.interpreter import cudnn_known

WIDTH, KEYS, MLP, BATCH, TOKENS = 4096, 1024, 14336, 4, 2048
POLICIES = {
    "none": None,
    **{name: getattr(jax.checkpoint_policies, name) for name in dir(jax.checkpoint_policies)},
    "fp8_saved": jax.checkpoint_policies.save_only_these_names("fp8_saved"),
}
DEFAULT = "none", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"
DEFAULT += "fp8_saved", "nothing_saveable"


class Block(nn.Module):
    """RMSNorm, grouped-query attention and SwiGLU."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        y, heads = nn.RMSNorm(dtype=jnp.bfloat16)(x), (*x.shape[:2], -1, 128)
        q, k, v = (dense(n)(y).reshape(heads) for n in (WIDTH, KEYS, KEYS))
        how = {"is_causal": True, "implementation": "cudnn"}
        y = jax.nn.dot_product_attention(q, k, v, **how).reshape(x.shape)
        x = x + dense(WIDTH)(y)
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return x + dense(WIDTH)(nn.silu(dense(MLP)(y)) * dense(MLP)(y)), None


class Model(nn.Module):
    """Layers in a scan, each in a checkpoint with a policy if there is one."""

    layers: int
    policy: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block: Any = Block
        if self.policy is not None:
            block = nn.remat(Block, prevent_cse=False, policy=self.policy)
        axes, split = {"params": 0}, {"params": True}
        stack = nn.scan(block, variable_axes=axes, split_rngs=split, length=self.layers)
        return stack()(x, None)[0]


def held(layers: int, recipe: str, policy: str) -> float:
    """Return the gigabytes of one step."""
    model: Any = Model(layers, POLICIES[policy])
    if recipe != "bf16":
        model = jfp8.convert(model, recipe, exempt=())
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.bfloat16)
    gpu = AbstractMesh((), (), abstract_device=device_of("h200"))
    with use_abstract_mesh(gpu), cudnn_known():
        variables = jax.eval_shape(model.init, jax.random.key(0), x)

        tx, fp8 = optax.adamw(1e-4), recipe != "bf16"

        def create(variables: Any) -> Any:
            if fp8:
                return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
            params = variables["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        def loss(variables: Any, x: jax.Array) -> Any:
            return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

        def step(state: Any, x: jax.Array) -> Any:
            if fp8:
                found = jfp8.value_and_grad(lambda v, x: (loss(v, x), {}))(state, x)
                return state.apply_gradients(found[1]), found[0]
            value, grads = jax.value_and_grad(lambda p: loss({"params": p}, x))(state.params)
            return state.apply_gradients(grads=grads), value

        args = jax.eval_shape(create, variables), x
        everywhere, how = jax.tree.map(lambda _: P(), args), {"donated": (0,), "dumped": False}
        compiled = compile_divided("h200", {"x": 1}, step, args, everywhere, **how)
    given = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args))
    return (compiled.memory - given) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "delayed"])
    parser.add_argument("--policies", nargs="+", default=DEFAULT, choices=POLICIES)
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    print(f"| policy | {' | '.join(args.recipes)} |\n{'|---' * (1 + len(args.recipes))}|")
    for policy in args.policies:
        sizes = [held(args.layers, recipe, policy) for recipe in args.recipes]
        cells = [f"{size:.1f} GB ({size / sizes[0]:.2f})" for size in sizes]
        print(f"| `{policy}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
