"""Every recipe there is, as a value, as text and as JSON; and every text there is, as a recipe."""

import copy
import dataclasses
import json
import os
import pickle
import random
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import jfp8
from jfp8 import quantizers, recipes
from jfp8.quantizers.rotations import Hadamard, RandomHadamard
from jfp8.scaling.casts import ROUNDINGS
from jfp8.scaling.formats import FORMATS

pytestmark = pytest.mark.property

# Recipes. What a field may be depends on its name, but for what is under the name of a class.

F32_SCALES = st.sampled_from([None, "power_of_two"])
E8M0_SCALES = st.sampled_from(["rceil", "floor", "ceil", "even"])
FORMAT_NAMES = st.sampled_from(["HYBRID", "E4M3", "E5M2"])
KINDS = ["fprop", "dgrad", "wgrad"]
# Lone surrogates too: a path may be anything.
patterns = st.lists(st.text(st.characters(exclude_categories=())), max_size=3).map(tuple)

FIELDS = {
    "accumulation": st.sampled_from(["f32", "f32_every_128", "hopper", "hopper_every_128"]),
    "fast_accumulation": st.none() | st.lists(st.sampled_from(KINDS), max_size=4).map(tuple),
    "wgrad_dtype": st.sampled_from([None, "bfloat16"]),
    "margin": st.integers(0, 32),
    "fp8_format": FORMAT_NAMES,
    "amax_history_len": st.integers(1, 1 << 20),
    "amax_compute_algo": st.sampled_from(["max", "most_recent"]),
    "scale_rounding": F32_SCALES,
    "high_precision_wgrad": st.booleans(),
    "two_dimensional_weights": st.booleans(),
    "wgrad_tiles": st.booleans(),
    "stochastic_rounding": st.booleans(),
    "random_hadamard": st.booleans(),
    "quantize_outputs": st.booleans(),
    "stochastic_gradients": st.booleans(),
    "fused": patterns,
    "weights": st.sampled_from(["rowwise", "mxfp8", "mxfp4"]),
    "activations": st.sampled_from([None, "rowwise", "mxfp8"]),
    "backward": st.sampled_from(["dequantized", "high_precision", "current", "block"]),
}
COMMON = ("accumulation", "fast_accumulation", "wgrad_dtype")
FIELDS_OF = dict.fromkeys(
    ("MXFP8BlockScaling", "MXFP4BlockScaling"), {"scale_rounding": E8M0_SCALES}
)


def fields_of(cls: type[recipes.Recipe]) -> dict[str, st.SearchStrategy[Any]]:
    own = FIELDS | FIELDS_OF.get(cls.__name__, {})
    return {f.name: own[f.name] for f in dataclasses.fields(cls)}


def calls(cls: type[recipes.Recipe]) -> st.SearchStrategy[tuple[type, dict[str, Any]]]:
    """A class, and some of its fields with values."""
    return st.tuples(st.just(cls), st.fixed_dictionaries({}, optional=fields_of(cls)))


named_calls = st.sampled_from(recipes.RECIPES).flatmap(calls)
named_recipes = named_calls.map(lambda call: call[0](**call[1]))

# Recipes of one's own. Not every combination makes sense: those that are refused are not drawn.

signed = st.sampled_from([fmt for fmt in FORMATS if fmt.signed])
with_nan = st.sampled_from([fmt for fmt in FORMATS if fmt.signed and fmt.has_nan])
rounding = {"rounding": st.sampled_from(ROUNDINGS)}
block_sizes = st.tuples(st.sampled_from([16, 32, 128]), st.sampled_from([1, 16, 32]))
any_scales = F32_SCALES | E8M0_SCALES
delayed = st.builds(
    quantizers.Delayed,
    with_nan,
    margin=FIELDS["margin"],
    algo=FIELDS["amax_compute_algo"],
    scale_rounding=F32_SCALES,
    length=st.sampled_from([1, 16]),
    **rounding,
)
any_quantizer = st.one_of(
    st.builds(quantizers.Current, signed, F32_SCALES, **rounding),
    delayed,
    st.builds(quantizers.Unit, with_nan, **rounding),
    st.builds(quantizers.Rowwise, signed, F32_SCALES, **rounding),
    st.builds(quantizers.Blockwise, signed, block_sizes, any_scales, **rounding),
    st.builds(quantizers.TwoLevel, signed, block_sizes, scale_fmt=with_nan, **rounding),
    st.builds(
        quantizers.TwoLevel,
        st.just(jfp8.E2M1FN),
        st.just((16, 1)),
        targets=st.sampled_from([(), (6.0,), (6.0, 4.0)]),
        reach=st.sampled_from([1536.0, 100]),
        outer=st.sampled_from(["tensor", "row"]),
        **rounding,
    ),
)
rotations = (
    st.builds(Hadamard)
    | st.builds(RandomHadamard, st.sampled_from([1, 64]))
    | st.builds(
        Hadamard,
        st.integers(0, 4).flatmap(lambda n: st.tuples(*[st.sampled_from([-1, 1])] * (1 << n))),
    )
)


@st.composite
def unless_refused(draw, make, *arguments):
    """`make` of arguments that it accepts."""
    drawn = [draw(argument) for argument in arguments]
    try:
        return make(*drawn)
    except ValueError:
        return assume(False)


products = unless_refused(
    recipes.Product,
    st.none() | any_quantizer,
    st.none() | any_quantizer,
    st.none() | st.builds(quantizers.Current, signed, F32_SCALES),
    st.none() | rotations,
    st.booleans(),
)
own_recipes = unless_refused(
    lambda fprop, dgrad, wgrad, fields: recipes.PerOperand(
        fprop=fprop, dgrad=dgrad, wgrad=wgrad, **fields
    ),
    products,
    products,
    products,
    st.fixed_dictionaries({}, optional={n: FIELDS[n] for n in COMMON}),
)
any_recipe = named_recipes | own_recipes

NAMES = {
    **vars(jfp8),
    **{name: getattr(recipes, name) for name in recipes.__all__},
    **{name: getattr(quantizers, name) for name in quantizers.__all__},
    "Hadamard": Hadamard,
    "RandomHadamard": RandomHadamard,
}


@given(any_recipe)
def test_json_repr_copies_and_pickles_give_the_recipe_back(recipe):
    """To the last field; and as equal things do, with an equal hash, text and JSON."""
    written = recipe.to_json()
    copies = [
        recipes.from_json(written),
        eval(repr(recipe), dict(NAMES)),
        copy.deepcopy(recipe),
        pickle.loads(pickle.dumps(recipe)),
        dataclasses.replace(recipe),
    ]
    for again in copies:
        assert type(again) is type(recipe)
        assert again == recipe
        assert vars(again) == vars(recipe)
        assert hash(again) == hash(recipe)
        assert repr(again) == repr(recipe)
        assert again.to_json() == written
        assert again.resolved() == recipe.resolved()


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["HYBRID", "f32", "max", "power_of_two", "fprop", "delayed", "Current"]),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def as_field(value: Any) -> Any:
    return tuple(map(as_field, value)) if isinstance(value, list) else value


def check_field_of_recipe(cls: type[recipes.Recipe], name: str, value: Any) -> None:
    field = as_field(value)
    text = json.dumps({"recipe": cls.name, name: value})
    try:
        recipe = cls(**{name: field})
    except (TypeError, ValueError) as error:
        message = str(error)
        assert f"{cls.__name__}({name}=" in message
        assert "must be" in message or "allowed are" in message
        with pytest.raises((TypeError, ValueError)):
            recipes.from_json(text)
    else:
        kept = getattr(recipe, name)
        assert kept == field
        assert type(kept) is type(field)
        assert recipes.from_json(text) == recipe
        assert recipe.resolved().quantizers()


@given(values)
def test_a_field_takes_its_values_or_says_what_it_would_take(value):
    """Alike from Python and from JSON, any value in any field, which the message names."""
    for cls in recipes.RECIPES:
        for field in dataclasses.fields(cls):
            check_field_of_recipe(cls, field.name, value)


QUANTIZERS = (
    quantizers.Blockwise,
    quantizers.Current,
    quantizers.Delayed,
    quantizers.Rowwise,
    quantizers.TwoLevel,
    quantizers.Unit,
)


def check_field_of_quantizer(cls: type[quantizers.Quantizer], name: str, value: Any) -> None:
    fields = {"fmt": jfp8.E4M3FN, name: as_field(value)}
    try:
        quantizer = cls(**fields)
    except (TypeError, ValueError) as error:
        message = str(error)
        assert name in message
        assert repr(fields[name]) in message
    else:
        assert getattr(quantizer, name) == fields[name]
        plain = recipes.Product(None, None)
        recipe = recipes.PerOperand(recipes.Product(quantizer, None), plain, plain)
        assert recipes.from_json(recipe.to_json()) == recipe


@given(values)
def test_a_field_of_a_quantizer_is_checked_as_well(value):
    for cls in QUANTIZERS:
        for field in dataclasses.fields(cls):
            check_field_of_quantizer(cls, field.name, value)


@given(st.sampled_from(recipes.RECIPES), st.text(max_size=12), values)
def test_an_unknown_field_is_refused_with_the_known_ones(cls, name, value):
    known = [f.name for f in dataclasses.fields(cls)]
    assume(name not in known)
    assume(name != "recipe")
    text = json.dumps({"recipe": cls.name, name: value})
    with pytest.raises((TypeError, ValueError)) as error:
        recipes.from_json(text)
    assert str(error.value)
    with pytest.raises(TypeError, match="has no field") as error:
        cls(**{name: as_field(value)})
    assert all(field in str(error.value) for field in known)


FRAGMENTS = [
    *'{}[]",:\\ \n\x00',
    *("null", "true", "NaN", "-Infinity", "1e999", "-1", "0.5", "16.0", "9" * 5000),
    *('"recipe"', '"class"', '"Format"', '"fmt"', '"Current"', '"ScaledArray"', '"Context"'),
    *('{"class": "Format"}', '{"class": []}', '{"class": {}}', '"self": 1, ', '"cls": 1, '),
    *("__import__('os').abort()", '"__class__"', '"eval"', "\ud800", "[" * 5000, '{"a":' * 5000),
]


def mutated(text: str, seed: int, changes: int) -> str:
    """`text` after some changes: pieces cut out, doubled, replaced by others or by fragments."""
    rng = random.Random(seed)
    for _ in range(changes):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 1, 2, 8, 30]))
        other = rng.randrange(len(text) + 1)
        piece = rng.choice(["", text[start:end] * 2, text[other : other + 12], *FRAGMENTS])
        text = text[:start] + piece + text[end:]
    return text


def called(function, *args) -> tuple[Any, set[Any]]:
    """What `function` returns or raises, and the functions in C that it called on the way."""
    functions = set()

    def watch(frame, event, function):
        if event == "c_call":
            functions.add(function)

    sys.setprofile(watch)
    try:
        result = function(*args)
    except Exception as error:
        result = error
    finally:
        sys.setprofile(None)
    return result, functions


RUNNING_CODE = {eval, exec, compile, __import__, open, pickle.loads, os.system, os.abort}


def check_any_text(text: str) -> None:
    """`text` is a recipe, which can be written again, or an error with a message; nothing else."""
    result, functions = called(recipes.from_json, text)
    assert not functions & RUNNING_CODE
    if isinstance(result, Exception):
        assert type(result) in (ValueError, TypeError), repr(result)
        assert str(result)
    else:
        assert isinstance(result, recipes.Recipe)
        assert recipes.from_json(result.to_json()) == result


@given(any_recipe, st.integers(0, 1 << 32), st.integers(1, 6))
def test_a_text_with_errors_is_refused_and_runs_no_code(recipe, seed, changes):
    for i in range(20):
        check_any_text(mutated(recipe.to_json(), seed + i, changes))


@given(values)
def test_json_of_anything_else_is_refused(value):
    check_any_text(json.dumps(value))
    check_any_text(json.dumps({"recipe": value}))
    check_any_text(json.dumps({"recipe": "delayed", "margin": value}))
    check_any_text(json.dumps({"recipe": "PerOperand", "fprop": value, "dgrad": {"class": value}}))


def test_the_watch_sees_code_that_runs():
    """Or the two properties above would hold for anything."""
    result, functions = called(lambda: eval("1 + 1"))
    assert result == 2
    assert functions & RUNNING_CODE
