"""Policies of `jax.checkpoint` save of FP8 layers what they save of Flax's."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as of_jax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import jfp8
from jfp8.checkpoint_policies import seeing_fp8

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


def test_a_report_warns_about_policies_that_do_not_see_fp8_matmuls():
    """The policies of converted models do."""
    policy = of_jax.dots_saveable
    layer = lambda dense, policy: nn.remat(dense, policy=policy)(64)
    found = {
        "ours": (layer(jfp8.Dense, policy), ("dots_saveable",)),
        "our policy": (layer(jfp8.Dense, jfp8.checkpoint_policies.dots_saveable), ()),
        "converted": (jfp8.convert(layer(nn.Dense, policy), "current", exempt=()), ()),
        "everything": (layer(jfp8.Dense, of_jax.everything_saveable), ()),
    }
    for model, blind in found.values():
        variables = jax.eval_shape(model.init, jax.random.key(0), X)
        told = pytest.warns(UserWarning, match="policy=jfp8.checkpoint_policies.dots_saveable")
        with told if blind else contextlib.nullcontext():
            assert jfp8.report(model, variables, X).blind == blind


def test_a_policy_is_asked_about_a_result_by_name_and_as_a_matmul():
    a_name = jax.make_jaxpr(lambda x: checkpoint_name(x, "fp8_result"))(1.0).eqns[0].primitive
    ask = lambda policy, name: seeing_fp8(policy)(a_name, name=name)
    names = of_jax.save_only_these_names("fp8_result", "mine")
    assert [ask(names, name) for name in ("fp8_result", "mine", "other")] == [True, True, False]
    except_ours = of_jax.save_any_names_but_these("fp8_result")
    assert [ask(except_ours, name) for name in ("fp8_result", "other")] == [False, True]
    of_dots = of_jax.offload_dot_with_no_batch_dims("device", "pinned_host")
    assert ask(of_dots, "fp8_result").dst == "pinned_host"
    assert not hasattr(ask(of_dots, "other"), "dst")
