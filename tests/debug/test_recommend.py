"""`jfp8.debug.recommend`: predictions against measured errors, the choice, and what it refuses."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.debug import recommend

M, K, N = 128, 192, 64
KEYS = jax.random.split(jax.random.key(0), 4)
X = dict.fromkeys(("quiet", "loud"), jax.random.normal(KEYS[0], (M, K)))
GRADS = {"quiet": jax.random.normal(KEYS[1], (M, N)), "loud": jax.random.normal(KEYS[2], (M, N))}
GRADS["loud"] *= 30


class TwoLayers(nn.Module):
    """With gradients of different sizes."""

    @nn.compact
    def __call__(self, xs):
        return {name: nn.Dense(N, use_bias=False, name=name)(xs[name]) for name in GRADS}


def loss_fn(model, params, xs, grads):
    ys = model.apply({"params": params}, xs)
    return sum(jnp.sum(ys[name] * grads[name]) for name in grads), ys


@pytest.fixture(scope="module")
def run():
    """Rows under MX and NVFP4, a report, gradients and results under each, and the kernels."""
    plain, rows, results = TwoLayers(), [], {}
    params = jax.jit(plain.init)(KEYS[3], X)["params"]
    for name in ("mxfp8", "nvfp4"):
        model = jfp8.convert(plain, {"*": name}, exempt=())
        step = jax.grad(lambda *args, model=model: loss_fn(model, *args), (0, 1), has_aux=True)
        results[name], seen = jax.jit(jfp8.debug.stats(step))(params, X, GRADS)
        rows += seen.rows(step=0)
    _, seen = jax.jit(jfp8.debug.stats(model.apply))({"params": params}, X)
    rows += seen.rows(step=1)  # a step without gradients
    model = jfp8.convert(plain, "nvfp4", exempt=())
    kernels = {name: layer["kernel"] for name, layer in params.items()}
    return rows, jfp8.report(model, {"params": params}, X), results, kernels


@pytest.mark.slow
def test_predicted_errors_are_those_of_the_products(run):
    rows, products, results, params = run
    found = recommend(rows, products, share=0.5)
    assert (found.few.name, found.otherwise.name) == ("nvfp4", "mxfp8")
    for layer in found.layers:
        x, w, g = (
            np.asarray(v, float) for v in (X[layer.path], params[layer.path], GRADS[layer.path])
        )
        exact = {"fprop": x @ w, "dgrad": g @ w.T, "wgrad": x.T @ g}
        for name, predicted in (("nvfp4", layer.in_few), ("mxfp8", layer.otherwise)):
            (dw, dx), y = results[name]
            of = {
                "fprop": y[layer.path],
                "dgrad": dx[layer.path],
                "wgrad": dw[layer.path]["kernel"],
            }
            # Sums of 8,192 squares or more, whose roundings correlate within a block.
            for kind, wanted in exact.items():
                error = np.linalg.norm(of[kind] - wanted) / np.linalg.norm(wanted)
                assert getattr(predicted, kind) == pytest.approx(error, rel=0.08), kind
            noise = float(np.sum((of["wgrad"] - exact["wgrad"]) ** 2))
            assert predicted.noise == pytest.approx(noise, rel=0.16)


def test_the_noisiest_layer_is_kept_in_more_bits(run):
    rows, products, *_ = run
    found = recommend(rows, products, share=0.5)
    assert found.recipes == {"loud": jfp8.recipes.get("mxfp8"), "*": jfp8.recipes.get("nvfp4")}
    assert found.share == 0.5
    quiet, loud = (next(x for x in found.layers if x.path == name) for name in ("quiet", "loud"))
    left = quiet.in_few.noise + loud.otherwise.noise
    assert found.noise == pytest.approx(left / (quiet.in_few.noise + loud.in_few.noise))
    assert str(found).splitlines()[:4] == [
        "50 % of the FLOPs in nvfp4, the others in mxfp8.",
        f"Rounding adds {100 * found.noise:.3g} % of the noise that nvfp4 everywhere would add to "
        "the gradients of weights.",
        "",
        "layer  recipe  FLOPs   fprop   dgrad   wgrad  of the noise, in nvfp4",
    ]
    converted = jfp8.convert(TwoLayers(), found.recipes, exempt=())
    report = jfp8.report(converted, jax.eval_shape(converted.init, KEYS[3], X), X)
    assert {row.path: row.recipe for row in report.rows} == {"loud": "mxfp8", "quiet": "nvfp4"}


def test_one_recipe_is_compared_with_high_precision(run):
    rows, products, *_ = run
    of_four_bits = [row for row in rows if row.recipe == "nvfp4"]
    own = jfp8.recipes.NVFP4BlockScaling(stochastic_rounding=False)
    found = recommend(of_four_bits, products, share=0.5, recipes=[own])
    assert found.recipes == {"loud": None, "*": own}
    assert recommend(of_four_bits, products, share=0.51).recipes == {"*": jfp8.recipes.get("nvfp4")}
    assert found.noise < 0.01


def test_what_it_refuses(run):
    rows, products, *_ = run
    forward = [row for row in rows if row.tensor != "grad"]
    few = [row for row in rows if row.recipe == "nvfp4"]
    lacking = [row for row in rows if (row.recipe, row.path) != ("mxfp8", "loud")]
    for error, args, share, message in (
        (TypeError, (["row"], products), 0.5, "stats.rows"),
        (TypeError, (few, few), 0.5, "jfp8.report"),
        (ValueError, (few, products), 1.5, "share=1.5"),
        (ValueError, ([], products), 0.5, "Measure training steps"),
        (ValueError, (forward, products), 0.5, "Measure training steps"),
        (ValueError, (lacking, products), 0.5, "'loud' under one of 'nvfp4' and 'mxfp8'"),
        (ValueError, (few, jfp8.Report(())), 0.5, "none of the layers"),
    ):
        with pytest.raises(error, match=message):
            recommend(*args, share=share)
