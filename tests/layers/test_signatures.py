"""Constructors name what they take: for people, for completion and for type checkers."""

import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx.nn import dtypes

import jfp8
from jfp8.layers.transformer_options import Architecture, TransformerOptions

ROOT = Path(__file__).parents[2]
NAMES = [(module, name) for module in (jfp8.nnx, jfp8.linen) for name in module.__all__]
# Flax's layers take their products by these.
HOOK = re.compile(r".*dot_general(_cls)?|conv_general_dilated|einsum_op")
OWN = {"recipe", "implementation", "attention_products"}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m.__name__}.{n}" for m, n in NAMES])
def test_what_is_public_names_its_parameters(module, name):
    value = getattr(module, name)
    parameters = inspect.signature(value).parameters
    assert "self" not in parameters
    rest = [p.name for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    # Users choose the names of what a variable of NNX says about itself.
    is_variable = inspect.isclass(value) and issubclass(value, nnx.Variable)
    assert rest == (["metadata"] if is_variable else [])
    assert all(p.annotation is not p.empty for p in parameters.values())
    assert (value.__doc__ or "").strip()


@pytest.mark.parametrize(
    "name", ["Linear", "LinearGeneral", "Conv", "ConvTranspose", "Einsum", "MultiHeadAttention"]
)
def test_layers_take_what_those_of_flax_take(name):
    """The same parameters with the same defaults, in the same order where it matters."""
    flax = inspect.signature(getattr(nnx, name).__init__).parameters
    flax = {n: p for n, p in flax.items() if n != "self" and not HOOK.fullmatch(n)}
    ours = inspect.signature(getattr(jfp8.nnx, name)).parameters
    shared = {n: p for n, p in ours.items() if n not in OWN}
    assert shared.keys() == flax.keys()
    for n, p in flax.items():
        assert shared[n].kind == p.kind, n
        given, wanted = (
            dict(d) if isinstance(d, Mapping) else d for d in (shared[n].default, p.default)
        )
        assert given == wanted, n
    positional = lambda found: [n for n, p in found.items() if p.kind != p.KEYWORD_ONLY]
    assert positional(ours) == positional(flax)


def test_a_new_argument_of_flax_is_taken(monkeypatch):
    original = nnx.Linear.__init__

    def init(self, in_features: int, out_features: int, *, novel: int = 3, rngs: nnx.Rngs):
        original(self, in_features, out_features, rngs=rngs)
        self.novel = novel

    monkeypatch.setattr(nnx.Linear, "__init__", init)
    known = inspect.signature(jfp8.nnx.Linear).parameters
    assert (known["novel"].default, known["novel"].annotation) == (3, int)
    assert list(known)[:2] == ["in_features", "out_features"]
    assert jfp8.nnx.Linear(3, 4, novel=5, recipe="current", rngs=nnx.Rngs(0)).novel == 5


def test_calls_take_what_those_of_flax_take():
    ours, flax = (
        inspect.signature(x.__call__) for x in (jfp8.nnx.MultiHeadAttention, nnx.MultiHeadAttention)
    )
    plain = lambda signature: [(p.name, p.kind, p.default) for p in signature.parameters.values()]
    if "input_positions" in flax.parameters:
        assert plain(ours) == plain(flax)
    else:  # Flax 0.12.8
        assert plain(ours)[:-1] == plain(flax)
        layer = jfp8.nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        with pytest.raises(TypeError, match=r"needs a newer Flax than .*: pip install -U flax"):
            layer(jnp.ones((1, 3, 8)), input_positions=jnp.arange(3)[None])


def test_blocks_of_nnx_have_the_defaults_of_those_of_linen():
    for name in ("LayerNormMLP", "MoE", "TransformerLayer", "RelativePositionBiases"):
        ours = inspect.signature(getattr(jfp8.nnx, name)).parameters
        linen = inspect.signature(getattr(jfp8.linen, name)).parameters
        both = ours.keys() & linen.keys()
        assert "param_dtype" in both
        plain = lambda p: getattr(p.default, "__qualname__", p.default)
        assert {n: plain(ours[n]) for n in both} == {n: plain(linen[n]) for n in both}
        where = {"state_collection", "parent", "name", "deterministic", "decode", "cache_dtype"}
        assert linen.keys() - ours.keys() <= where


def test_the_transformer_layer_of_linen_takes_its_fields_in_their_order_by_position():
    fields = dataclasses.fields(jfp8.TransformerLayer)
    names = [field.name for field in fields if not field.kw_only]
    by_name = {field.name for field in fields if field.kw_only}
    packed = ["local_window_size", "attention_sinks"]
    assert by_name == {"state_collection", "decode", "cache_dtype", *packed}
    architecture = [field.name for field in dataclasses.fields(Architecture)]
    own = ["attention_products", "saved_activations", "recipe", "implementation"]
    assert names == [*architecture, "deterministic", *own, "parent", "name"]
    assert [*architecture, *own, *packed] == [
        f.name for f in dataclasses.fields(TransformerOptions)
    ]


def test_subclasses_and_instances_have_signatures_of_their_own():
    class Own(jfp8.nnx.Linear):
        def __init__(self, size: int, *, rngs: nnx.Rngs, **options):
            super().__init__(size, size, rngs=rngs, **options)

    assert list(inspect.signature(Own).parameters) == ["size", "rngs", "options"]
    layer = Own(3, rngs=nnx.Rngs(0), use_bias=False)
    assert list(inspect.signature(layer).parameters) == ["inputs", "out_sharding"]
    assert inspect.signature(Own.__init__) != inspect.signature(jfp8.nnx.Linear.__init__)


def test_unknown_options_are_refused_with_the_closest_one():
    words = "Linear has no option 'kernal_init'. Did you mean .kernel_init.. Options: in_f"
    with pytest.raises(TypeError, match=words):
        jfp8.nnx.Linear(3, 4, kernal_init=3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="DotGeneral has no option 'xyz'. Options"):
        jfp8.nnx.DotGeneral(xyz="current")


WRONG_CALLS = ROOT / "tests/data/wrong_calls.py"


def errors_of_pyrefly(checker: str, elsewhere: Path) -> list[int]:
    command = [checker, "check", "--output-format", "json", WRONG_CALLS]
    found = ran([*command, "--python-interpreter-path", sys.executable], ROOT)
    return [e["line"] for e in json.loads(found)["errors"] if e["severity"] == "error"]


def errors_of_pyright(checker: str, elsewhere: Path) -> list[int]:
    # In the root of the project, it would allow a user what it allows jfp8 itself.
    how = {"typeCheckingMode": "standard", "include": [str(WRONG_CALLS)]}
    (elsewhere / "pyrightconfig.json").write_text(json.dumps(how), encoding="utf-8")
    command = [checker, "--outputjson", "--pythonpath", sys.executable, "-p", elsewhere]
    found = ran(command, elsewhere)
    errors = json.loads(found)["generalDiagnostics"]
    return [e["range"]["start"]["line"] + 1 for e in errors if e["severity"] == "error"]


def errors_of_mypy(checker: str, elsewhere: Path) -> list[int]:
    found = ran([checker, "--python-executable", sys.executable, WRONG_CALLS], elsewhere)
    return [int(n) for n in re.findall(r"wrong_calls.py:(\d+): error", found)]


def ran(command: list[Any], folder: Path) -> str:
    paths = os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}
    how = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(command, cwd=folder, env=paths, **how).stdout


CHECKERS = {
    "pyrefly": errors_of_pyrefly,
    "basedpyright": errors_of_pyright,
    "mypy": errors_of_mypy,
}


@pytest.mark.parametrize("name", CHECKERS)
@pytest.mark.representative(1)
def test_type_checkers_refuse_wrong_calls_and_nothing_else(name, tmp_path):
    checker = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip(f"{name} is not installed")
    lines = WRONG_CALLS.read_text(encoding="utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert len(wrong) == 33
    assert set(CHECKERS[name](checker, tmp_path)) == wrong


class MLP(nnx.Module):
    def __init__(self, linear, rngs):
        self.up = linear(8, 16, rngs=rngs)
        self.down = linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def recipes_printed(model) -> list[str]:
    return re.findall(r"recipe=(.*),", str(model))


def test_a_printed_model_shows_the_recipes_in_effect():
    model = MLP(jfp8.nnx.Linear, nnx.Rngs(0))
    assert recipes_printed(model) == ["DelayedScaling()"] * 2
    with jfp8.autocast("mxfp8"):
        assert recipes_printed(model) == ["MXFP8BlockScaling()"] * 2
    with jfp8.autocast(enabled=False):
        assert recipes_printed(model) == ["None"] * 2
    own = {"up": "rowwise", "*": jfp8.recipes.DelayedScaling(margin=1)}
    converted = jfp8.convert(MLP(nnx.Linear, nnx.Rngs(0)), recipe=own, exempt=())
    assert recipes_printed(converted.up) == [repr(jfp8.recipes.get("rowwise"))]
    assert recipes_printed(converted.down) == ["DelayedScaling(margin=1)"]
    attention = jfp8.nnx.DotProductAttention(recipe="current")
    assert recipes_printed(attention) == ["Float8CurrentScaling()"]


def test_a_printed_layer_shows_options_that_a_user_can_set_and_state():
    layer = jfp8.nnx.Linear(2, 3, recipe="delayed", rngs=nnx.Rngs(0))
    printed = re.findall(r"^ +([a-z_\d]+)=", str(layer), re.MULTILINE)
    plain = re.findall(r"^ +([a-z_\d]+)=", str(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), re.MULTILINE)
    product = ["recipe", "implementation", "path", "casts_kernel", "fp8", *["value"] * 4]
    at = plain.index("dot_general") + 1
    assert printed == [*plain[:at], *product, *plain[at:]]
    assert f"promote_dtype={dtypes.promote_dtype}," in str(layer)
    attention = str(jfp8.nnx.DotProductAttention())
    assert re.findall(r"(\w+)=", attention) == ["recipe", "implementation", "path"]
    assert "dot_general_cls = jfp8.linen.DotGeneral\n" in str(jfp8.Dense(3))


def layers_to_tabulate():
    """Models, inputs, and paths that a table of each has."""
    x, rngs = jnp.ones((2, 5, 8)), nnx.Rngs(0)
    attention = {"decode": False, "attention_products": True, "rngs": rngs}
    layer = {"enable_rotary_pos_emb": True, "self_attn_mask_type": "causal", "rngs": rngs}
    return {
        "converted": (jfp8.convert(MLP(nnx.Linear, rngs), exempt=()), x, ["up", "down"]),
        "experts": (jfp8.nnx.MoE(8, 4, 16, rngs=rngs), x, ["router"]),
        "attention": (jfp8.nnx.MultiHeadAttention(2, 8, **attention), x, ["query", "out"]),
        "transformer": (jfp8.nnx.TransformerLayer(8, 16, 2, **layer), x, ["mlp"]),
    }


@pytest.mark.parametrize("name", ["converted", "experts", "attention", "transformer"])
@pytest.mark.representative(1)
def test_tabulate(name):
    model, x, paths = layers_to_tabulate()[name]
    wide = {"width": 300, "force_terminal": False}
    table = nnx.tabulate(model, x, console_kwargs=wide)
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table.splitlines()]
    shown = [row[0] for row in rows if row and row[0]]
    assert set(paths) <= set(shown)
    count = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert re.search(rf"\b{count:,}\b", table)
    # No row for what is no layer.
    assert not [path for path in shown if re.search("histor|check|mask|normalize|begin|end$", path)]
