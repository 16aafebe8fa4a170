"""Ten mistakes of a first day, as in docs/quickstart.md: each message names the cure."""

import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfp8

PAGE = Path(__file__).parents[2] / "docs/quickstart.md"
KEY, X, Y = jax.random.key(0), jnp.ones((8, 32)), jnp.zeros((8, 4))
MODEL = jfp8.Dense(4)
MX = jfp8.recipes.MXFP8BlockScaling


def variables(model=MODEL):
    """What ``model.init`` returns, without its compile time."""
    shapes = jax.eval_shape(model.init, KEY, X)
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)


def create(model=MODEL, tx=None, **given):
    given = given or {"variables": variables(model)}
    return jfp8.TrainState.create(apply_fn=model.apply, tx=tx or optax.sgd(0.1), **given)


def loss_of_params(params, x, y):
    return jnp.mean((MODEL.apply({"params": params}, x) - y) ** 2)


def restore_another_recipe(folder):
    jfp8.checkpoint.save(folder / "state.safetensors", create())
    jfp8.checkpoint.restore(folder / "state.safetensors", create(jfp8.Dense(4, recipe=MX())))


def forget_to_scale_the_loss(folder):
    tx = optax.chain(jfp8.loss_scale(), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    tx.update(params, tx.init(params), params)


# A mistake as written: its code, the beginning of the message, and the cure that it names.
MISTAKES = {
    '`jfp8.Dense(4, recipe="mxfp")`': (
        lambda folder: jfp8.Dense(4, recipe="mxfp").init(KEY, X),
        "ValueError: There is no recipe called 'mxfp'.",
        '"mxfp8" (MXFP8BlockScaling)',
    ),
    "`recipe=MXFP8BlockScaling`, without `()`": (
        lambda folder: jfp8.Dense(4, recipe=MX).init(KEY, X),
        "TypeError: recipe must be a recipe object, got the class MXFP8BlockScaling.",
        "recipe=MXFP8BlockScaling()",
    ),
    '`jfp8.Dense(4, "mxfp8")`, by position': (
        lambda folder: jfp8.Dense(4, "mxfp8").init(KEY, X),
        "TypeError: jfp8.Dense got use_bias='mxfp8'.",
        "jfp8.Dense(..., recipe=...)",
    ),
    "`dtype=jnp.float8_e4m3fn` in a layer": (
        lambda folder: jfp8.Dense(4, dtype=jnp.float8_e4m3fn).init(KEY, X),
        "TypeError: The layer was given dtype=float8_e4m3fn, to which Flax rounds its operands "
        "without a scale.",
        "Leave dtype out",
    ),
    "`jfp8.convert(MyModel)`, the class": (
        lambda folder: jfp8.convert(nn.Dense),
        "TypeError: model must be a Flax Linen or NNX module, got the class Dense.",
        "jfp8.convert(MyModel(...), recipe)",
    ),
    "`jfp8.convert(nn.Dense(4))`, one layer": (
        lambda folder: jfp8.convert(nn.Dense(4)).init(KEY, X),
        "UserWarning: No product of Dense is FP8: jfp8.convert changed nothing.",
        "exempt=() exempts none",
    ),
    '`TrainState.create(variables=variables["params"])`': (
        lambda folder: create(variables=variables()["params"]),
        "ValueError: variables has the collections ['bias', 'kernel'], but no 'params'.",
        "Pass all that model.init(...) returned",
    ),
    "a loss function of `params` instead of `variables`": (
        lambda folder: jfp8.value_and_grad(loss_of_params)(create(), X, Y),
        "ApplyScopeInvalidVariablesStructureError: Expect the `variables` (first argument) passed "
        'to apply() to be a dict with the structure {"params": ...}',
        "model.apply(variables, x)",
    ),
    "`jfp8.loss_scale()` in the optimizer alone": (
        forget_to_scale_the_loss,
        "UserWarning: loss_scale() divides the gradients by its scale S (32768 at first), but "
        "nothing has multiplied the loss by S",
        "jfp8.scale_loss(loss, opt_state)",
    ),
    "`restore` of a checkpoint of another recipe": (
        restore_another_recipe,
        "CheckpointChange: Amax histories that the target has no place for are dropped",
        "restore into a model with the recipe that was saved",
    ),
}


def told(mistake, folder):
    """Type and text of what is raised or warned of, and the file that it points to."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            mistake(folder)
        except Exception as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            return f"{type(error).__name__}: {error}{notes}", __file__
    (warning,) = warned
    return f"{warning.category.__name__}: {warning.message}", warning.filename


@pytest.mark.parametrize("written", MISTAKES)
def test_a_mistake_is_told_with_its_cure(written, tmp_path):
    mistake, beginning, cure = MISTAKES[written]
    message, file = told(mistake, tmp_path)
    assert message.startswith(beginning)
    assert cure in message
    assert file == __file__  # a warning is shown at the user's own line


def row_of(written):
    _, beginning, _ = MISTAKES[written]
    quote = "``" if "`" in beginning else "`"
    return f"| {written} | {quote}{beginning}{quote} |"


def test_quickstart_has_them_in_its_table():
    page = PAGE.read_text(encoding="utf-8").splitlines()
    head = page.index("| mistake | message |")
    assert page[head + 2 : head + 2 + len(MISTAKES)] == [row_of(written) for written in MISTAKES]


def test_an_fp8_dtype_is_refused_in_nnx():
    """Flax would round operands without a scale, and the result too: wrong numbers in silence."""
    model = jfp8.nnx.Linear(32, 4, dtype=jnp.float8_e5m2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="Leave dtype out"):
        model(X)
