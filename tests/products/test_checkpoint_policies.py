"""Policies of `jax.checkpoint` save of FP8 layers what they save of Flax's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as of_jax
from jax.ad_checkpoint import print_saved_residuals

import jfp8

X = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
WITHOUT_HISTORIES = jfp8.recipes.get("current")


@pytest.fixture
def saved(capsys):
    return lambda *given, **options: _saved(capsys, *given, **options)


def _saved(capsys, dense, policy, **options):
    """Dtypes and shapes of what a block saves for the backward pass beside its arguments."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = lambda n, name: dense(n, name=name, dtype=jnp.bfloat16, **options)
            y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
            return x + layer(64, "down")(nn.gelu(layer(256, "up")(y)))

    model = nn.remat(Block, policy=policy)()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    loss = lambda params, x: model.apply(params, x).astype(jnp.float32).sum()
    print_saved_residuals(loss, params, X)
    lines = [line.split(" ", 1) for line in capsys.readouterr().out.splitlines()]
    return [what for what, source in lines if "argument" not in source and "[]" not in what]


@pytest.mark.parametrize("name", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
def test_a_policy_saves_the_rounded_results_of_fp8_matmuls(name, saved):
    of_flax = saved(nn.Dense, getattr(of_jax, name))
    assert of_flax == ["bf16[8,256]"]
    ours = getattr(jfp8.checkpoint_policies, name)
    assert saved(nn.Dense, ours) == of_flax
    assert saved(jfp8.Dense, ours, recipe=WITHOUT_HISTORIES) == of_flax
    assert saved(jfp8.Dense, getattr(of_jax, name), recipe=WITHOUT_HISTORIES) != of_flax
