"""Models that multiply by parameters themselves, against the same with products of jfp8."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jfp8
from jfp8.recipes.registry import get
from support.arrays import assert_same
from support.doors import Linen, Nnx, converted, loss_of, moved, original

SHAPES = {"q": (2, 8, 4), "kv": (2, 2, 8, 4), "vec": (2, 4, 8), "gate": (8, 8), "down": (8, 8)}
KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    name: 0.3 * jax.random.normal(key, shape)
    for key, (name, shape) in zip(KEYS, {**SHAPES, "table": (16, 8)}.items(), strict=True)
}
TOKENS = jnp.arange(12).reshape(2, 6)


def gemma(einsum, p, tokens):
    """Attention and a feed-forward layer as Gemma has them, and an embedding with its logits."""
    x = p["table"][tokens]
    q, (k, v) = einsum("q", "BTD,NDH->BTNH", x), einsum("kv", "BSD,CKDH->CBSKH", x)
    weights = nn.softmax(jnp.einsum("BTNH,BSNH->BTNS", q, k))
    x = x + einsum("vec", "BTNH,NHD->BTD", jnp.einsum("BTNS,BSNH->BTNH", weights, v))
    x = x + einsum("down", "...H,HF->...F", nn.gelu(einsum("gate", "...F,FH->...H", x)))
    return jnp.dot(x, p["table"].T)


def own(p, tokens):
    return gemma(lambda name, equation, x: jnp.einsum(equation, x, p[name]), p, tokens)


NAMES = tuple(SHAPES)


class WrittenLinen(Linen):
    """With `jfp8.linen.EinsumProduct`, each under the name that conversion gives to its state."""

    def convert(self, model, recipe, **options):
        product = lambda name: jfp8.linen.EinsumProduct(recipe=recipe, name=f"DotGeneral_{name}")
        einsum = lambda p: lambda name, equation, x: product(name)(equation, x, p[name])
        return original("linen", lambda p, x: gemma(einsum(p), p, x), self.params)


class WrittenNnx(Nnx):
    """With `jfp8.nnx.EinsumOp`."""

    def convert(self, model, recipe, *example, **options):
        product = lambda p, name: getattr(p.module, f"DotGeneral_{name}")
        einsum = lambda p: lambda name, equation, x: product(p, name)(equation, x, p[name])
        model = original("nnx", lambda p, x: gemma(einsum(p), p, x), self.params)
        for name in NAMES:
            setattr(model, f"DotGeneral_{name}", jfp8.nnx.EinsumOp(recipe=recipe))
        return model


WRITTEN = {"nnx": WrittenNnx, "linen": WrittenLinen}
RECIPES = ("current", "rowwise", "block", "mxfp8", "nvfp4", "direct_e5m2", "hybrid")


@pytest.mark.parametrize(
    ("door", "recipe"),
    [("nnx", "delayed"), ("linen", "delayed"), *(("linen", recipe) for recipe in RECIPES)],
)
@pytest.mark.representative(1)
@pytest.mark.filterwarnings("ignore:Small gradients are zero under")  # alike in both
def test_converted_einsums_have_the_bits_of_written_ones(door, recipe):
    """The first step makes histories, and the second uses them."""
    case = converted(door, own, PARAMS, TOKENS, recipe)
    expected = WRITTEN[door](own, PARAMS, TOKENS, get(recipe), (), {})
    for _ in range(2):
        assert_same(case.step(TOKENS), expected.step(TOKENS))
    states = {name.removeprefix("DotGeneral_"): x for name, x in expected.states().items()}
    assert_same(case.states(), states)
    loss, grads = case.step(TOKENS)
    assert loss != loss_of(case.plain(TOKENS))
    assert all(jnp.any(grad) for grad in grads.values())
    assert moved(case) == (set(NAMES) if recipe == "delayed" else set())
    rows = case.report(TOKENS).rows
    # Two projections in one einsum; the embedding gives the logits, and attention has no weights.
    assert sum(row.times for row in rows if row.fp8) == 3 * len(NAMES)
    reasons = {row.reason.partition(": ")[0] for row in rows if not row.fp8}
    assert reasons == {"exempt", "computed by no layer that can be converted"}
