"""Recipes: frozen values with names, JSON and messages that help."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jfp8
from jfp8 import recipes
from jfp8.quantizers import Current, Delayed, Unit
from jfp8.recipes import DelayedScaling, Float8CurrentScaling, Recipe, Unscaled

CLASSES = (DelayedScaling, Float8CurrentScaling, Unscaled)
NAMES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "unscaled": Unscaled}
# Every field of every recipe, with a value that is not its default.
OTHER = {
    DelayedScaling: {
        "margin": 3,
        "fp8_format": "E4M3",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "scale_rounding": "power_of_two",
    },
    Float8CurrentScaling: {"fp8_format": "E5M2", "scale_rounding": "power_of_two"},
    Unscaled: {"fp8_format": "E4M3"},
}
EACH_FIELD = [
    (cls, {field: value}) for cls, fields in OTHER.items() for field, value in fields.items()
]
SAMPLES = [cls() for cls in CLASSES]
SAMPLES += [cls(**fields) for cls, fields in EACH_FIELD]
SAMPLES += [cls(**fields) for cls, fields in OTHER.items()]
samples = pytest.mark.parametrize("recipe", SAMPLES, ids=str)
classes = pytest.mark.parametrize("cls", CLASSES)


# Values


def test_the_samples_cover_every_field_and_recipe():
    assert set(CLASSES) == set(recipes.RECIPES)
    for cls in CLASSES:
        fields = dataclasses.fields(cls)
        assert {f.name for f in fields} == set(OTHER[cls])
        assert all(OTHER[cls][f.name] != f.default for f in fields)


def test_defaults():
    expected = {
        "margin": 0,
        "fp8_format": "HYBRID",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "scale_rounding": None,
    }
    assert dataclasses.asdict(DelayedScaling()) == expected
    assert dataclasses.asdict(Float8CurrentScaling()) == {
        "fp8_format": "HYBRID",
        "scale_rounding": None,
    }
    assert dataclasses.asdict(Unscaled()) == {"fp8_format": "HYBRID"}


@samples
def test_frozen(recipe):
    for field in dataclasses.fields(recipe):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, field.name, getattr(recipe, field.name))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.something_else = 1


def test_equal_if_and_only_if_of_one_class_with_equal_fields():
    assert len(set(SAMPLES)) == len(SAMPLES) - 1  # Unscaled has one field, so it comes twice
    for i, one in enumerate(SAMPLES):
        for other in SAMPLES[i:]:
            same = type(one) is type(other) and vars(one) == vars(other)
            assert (one == other) == same
            assert hash(one) == hash(other) or not same
        rebuilt = type(one)(**vars(one))
        assert rebuilt is not one
        assert rebuilt == one
        assert hash(rebuilt) == hash(one)


@samples
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda r: pickle.loads(pickle.dumps(r)),
        dataclasses.replace,
        lambda r: recipes.from_json(r.to_json()),
        lambda r: type(r)(*vars(r).values()),
        lambda r: recipes.get(r.name, **vars(r)),
        lambda r: recipes.get(type(r).__name__, **vars(r)),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "json", "positional", "get", "get by class name"],
)
def test_round_trips(recipe, duplicate):
    result = duplicate(recipe)
    assert type(result) is type(recipe)
    assert vars(result) == vars(recipe)
    assert result == recipe
    assert hash(result) == hash(recipe)


@pytest.mark.parametrize(("cls", "field"), EACH_FIELD)
def test_replace_changes_one_field(cls, field):
    changed = dataclasses.replace(cls(), **field)
    assert changed == cls(**field)
    assert changed != cls()


@samples
def test_repr_can_be_evaluated(recipe):
    assert eval(repr(recipe), {cls.__name__: cls for cls in CLASSES}) == recipe


# What a recipe means


@pytest.mark.parametrize(
    ("fp8_format", "forward", "backward"),
    [
        ("HYBRID", jfp8.E4M3FN, jfp8.E5M2),
        ("E4M3", jfp8.E4M3FN, jfp8.E4M3FN),
        ("E5M2", jfp8.E5M2, jfp8.E5M2),
    ],
)
@classes
def test_formats(cls, fp8_format, forward, backward):
    operands = cls(fp8_format=fp8_format).operands()
    assert (operands.lhs.fmt, operands.rhs.fmt, operands.grad.fmt) == (forward, forward, backward)
    assert operands.fast_accumulation == (True, False, False)


def test_fields_reach_the_quantizers():
    assert DelayedScaling().operands().lhs == Delayed(jfp8.E4M3FN)
    assert DelayedScaling(
        margin=2, amax_compute_algo="most_recent", scale_rounding="power_of_two"
    ).operands().grad == Delayed(jfp8.E5M2, 2, "most_recent", "power_of_two")
    assert Float8CurrentScaling(scale_rounding="power_of_two").operands().rhs == Current(
        jfp8.E4M3FN, "power_of_two"
    )
    assert Unscaled().operands().grad == Unit(jfp8.E5M2)


@pytest.mark.parametrize("length", [1, 5, 1024])
def test_state(length):
    state = DelayedScaling(amax_history_len=length).init_state()
    assert set(state) == {"lhs", "rhs", "grad"}
    for role in state.values():
        assert {k: (v.shape, v.dtype) for k, v in role.items()} == {
            "amax_history": ((length,), jnp.float32),
            "amax": ((), jnp.float32),
        }
        assert not any(leaf.any() for leaf in jax.tree.leaves(role))
    assert Float8CurrentScaling().init_state() is None
    assert Unscaled().init_state() is None


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match=r'Recipe is abstract.*"delayed" \(DelayedScaling\)'):
        Recipe().operands()


# Names


@pytest.mark.parametrize("name", NAMES)
def test_get(name):
    cls = NAMES[name]
    assert recipes.get(name) == recipes.get(cls.__name__) == cls()
    assert recipes.get(name, fp8_format="E5M2") == cls(fp8_format="E5M2")
    assert cls.name == name


@pytest.mark.parametrize("name", ["Delayed", "mxfp8", "", "Recipe", None, 3])
def test_get_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="no recipe called") as error:
        recipes.get(name)
    assert repr(name) in str(error.value)
    for short, cls in NAMES.items():
        assert f'"{short}" ({cls.__name__})' in str(error.value)


# JSON


@samples
def test_json_is_a_flat_object(recipe):
    assert json.loads(recipe.to_json()) == {"recipe": type(recipe).__name__, **vars(recipe)}


@pytest.mark.parametrize("name", NAMES)
def test_from_json_takes_short_names_and_omitted_fields(name):
    assert recipes.from_json(json.dumps({"recipe": name})) == NAMES[name]()
    text = json.dumps({"fp8_format": "E4M3", "recipe": NAMES[name].__name__})
    assert recipes.from_json(text) == NAMES[name](fp8_format="E4M3")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", ValueError, r"Not JSON.*to_json\(\)"),
        ("DelayedScaling", ValueError, "Not JSON"),
        ("{'recipe': 'delayed'}", ValueError, "Not JSON"),
        ("[]", ValueError, r'object such as \{"recipe": "DelayedScaling".*got'),
        ('"delayed"', ValueError, "object such as"),
        ("{}", ValueError, "object such as"),
        ('{"recipe": 3}', ValueError, "object such as"),
        ('{"recipe": "fp4"}', ValueError, "no recipe called 'fp4'.*DelayedScaling"),
        ('{"recipe": "delayed", "history": 3}', TypeError, "no field 'history'.*Fields: margin"),
        ('{"recipe": "delayed", "margin": 0.5}', TypeError, "margin=0.5.*must be an int"),
        ('{"recipe": "delayed", "margin": true}', TypeError, "margin=True.*must be an int"),
        ('{"recipe": "delayed", "amax_history_len": 16.0}', TypeError, "=16.0.*must be an int"),
        ('{"recipe": "delayed", "amax_history_len": 0}', ValueError, "=0.*from 1 to"),
        ('{"recipe": "current", "fp8_format": "fp8"}', ValueError, "'fp8'.*'HYBRID'"),
        ('{"recipe": "current", "fp8_format": ["E4M3"]}', ValueError, "allowed are 'HYBRID'"),
    ],
)
def test_from_json_errors(text, error, words):
    with pytest.raises(error, match=words):
        recipes.from_json(text)


# Fields


@pytest.mark.parametrize(
    ("cls", "field", "suggestion"),
    [
        (DelayedScaling, "amax_histroy_len", "amax_history_len"),
        (DelayedScaling, "amax_history_length", "amax_history_len"),
        (DelayedScaling, "amax_compute_algorithm", "amax_compute_algo"),
        (DelayedScaling, "margins", "margin"),
        (Float8CurrentScaling, "fp8_fromat", "fp8_format"),
        (Float8CurrentScaling, "scale_round", "scale_rounding"),
        (Unscaled, "fp8format", "fp8_format"),
        (Unscaled, "margin", None),
        (DelayedScaling, "colour", None),
    ],
)
@pytest.mark.parametrize("how", ["call", "get", "replace", "json"])
def test_unknown_field(cls, field, suggestion, how):
    make = {
        "call": cls,
        "get": partial(recipes.get, cls.name),
        "replace": partial(dataclasses.replace, cls()),
        "json": lambda **fields: recipes.from_json(json.dumps({"recipe": cls.name, **fields})),
    }[how]
    with pytest.raises(TypeError, match=f"{cls.__name__} has no field {field!r}") as error:
        make(**{field: 1})
    message = str(error.value)
    assert ("Did you mean" in message) == (suggestion is not None)
    assert suggestion is None or f"Did you mean {suggestion!r}?" in message
    assert all(f.name in message.split("Fields: ")[1] for f in dataclasses.fields(cls))


@pytest.mark.parametrize("value", [True, False, 16.0, 0.5, "16", None, (16,)])
@pytest.mark.parametrize("field", ["amax_history_len", "margin"])
def test_error_no_int(field, value):
    with pytest.raises(TypeError, match=rf"DelayedScaling\({field}=.*must be an int") as error:
        DelayedScaling(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("amax_history_len", 0, "from 1 to"),
        ("amax_history_len", -1, "from 1 to"),
        ("amax_history_len", 2**20 + 1, "to 1048576"),
        ("margin", -1, "from 0 to 32"),
        ("margin", 33, "from 0 to 32"),
    ],
)
def test_error_out_of_range(field, value, words):
    with pytest.raises(ValueError, match=rf"{field}={value}\).*{words}"):
        DelayedScaling(**{field: value})


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("fp8_format", "'HYBRID', 'E4M3', 'E5M2'"),
        ("amax_compute_algo", "'max', 'most_recent'"),
        ("scale_rounding", "None, 'power_of_two'"),
    ],
)
@pytest.mark.parametrize("value", ["hybrid", "rceil", 0, False, "", jfp8.E4M3FN])
def test_error_choice(field, allowed, value):
    for cls in CLASSES:
        if field in OTHER[cls]:
            with pytest.raises(ValueError, match=f"allowed are {allowed}") as error:
                cls(**{field: value})
            assert f"{cls.__name__}({field}={value!r})" in str(error.value)


# As static arguments of jit


@samples
def test_equal_recipes_share_a_trace(recipe):
    traces = []

    @partial(jax.jit, static_argnames="recipe")
    def f(x, recipe):
        traces.append(recipe)
        return x + len(vars(recipe))

    for again in (recipe, copy.deepcopy(recipe), recipes.from_json(recipe.to_json())):
        assert f(jnp.zeros(()), recipe=again) == len(vars(recipe))
    assert traces == [recipe]
    f(jnp.zeros(()), recipe=DelayedScaling(margin=31))
    assert len(traces) == 2
