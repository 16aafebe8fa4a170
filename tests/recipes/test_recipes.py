"""Recipes: frozen values with names, JSON and messages that help."""

import dataclasses
import html
import json
import re
from functools import partial
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, recipes
from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.quantizer import Context, Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rotations import Hadamard
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.block_scaling import Float8BlockScaling, MXFP8BlockScaling
from jfp8.recipes.intel import DirectE5M2, Hybrid
from jfp8.recipes.mxfp4 import MXFP4BlockScaling
from jfp8.recipes.nvfp4 import NVFP4BlockScaling, NVFP4FourOverSix, NVFP4RowScaling
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.product import Product, Products
from jfp8.recipes.qat import QuantizationAware
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeName
from jfp8.recipes.rowwise import RowwiseScaling
from jfp8.recipes.unscaled import Unscaled

NAMES = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "rowwise": RowwiseScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "mxfp4": MXFP4BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "nvfp4_4over6": NVFP4FourOverSix,
    "nvfp4_row": NVFP4RowScaling,
    "qat": QuantizationAware,
    "direct_e5m2": DirectE5M2,
    "hybrid": Hybrid,
    "unscaled": Unscaled,
}
CLASSES = tuple(NAMES.values())
TOOLKIT = {
    "quantize_outputs": False,
    "fused": ("*/logits", "Block_*/query"),
    "stochastic_gradients": False,
    "accumulation": "f32_every_128",
}
NVFP4_OTHER = {
    "stochastic_rounding": False,
    "random_hadamard": False,
    "two_dimensional_weights": False,
    "accumulation": "f32_every_128",
}
# Every field of every recipe, with a value that is not its default.
OTHER = {
    DelayedScaling: {
        "margin": 3,
        "fp8_format": "E4M3",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "scale_rounding": "power_of_two",
        "accumulation": "hopper",
    },
    Float8CurrentScaling: {
        "fp8_format": "E5M2",
        "scale_rounding": "power_of_two",
        "accumulation": "hopper_every_128",
    },
    RowwiseScaling: {
        "fp8_format": "HYBRID",
        "scale_rounding": None,
        "high_precision_wgrad": True,
        "accumulation": "f32_every_128",
    },
    Float8BlockScaling: {
        "fp8_format": "E5M2",
        "scale_rounding": None,
        "wgrad_tiles": True,
        "accumulation": "f32",
    },
    MXFP8BlockScaling: {
        "fp8_format": "HYBRID",
        "scale_rounding": "floor",
        "two_dimensional_weights": True,
        "accumulation": "hopper",
    },
    MXFP4BlockScaling: {
        "scale_rounding": "even",
        "stochastic_rounding": False,
        "random_hadamard": False,
        "accumulation": "f32_every_128",
    },
    NVFP4BlockScaling: NVFP4_OTHER,
    NVFP4FourOverSix: NVFP4_OTHER,
    NVFP4RowScaling: NVFP4_OTHER,
    QuantizationAware: {
        "weights": Blockwise(E4M3FN, (128, 128)),
        "activations": "rowwise",
        "backward": "mxfp8",
        "accumulation": "f32_every_128",
    },
    DirectE5M2: TOOLKIT,
    Hybrid: TOOLKIT,
    Unscaled: {"fp8_format": "E4M3", "accumulation": "hopper"},
}
COMMON = {"fast_accumulation": ("dgrad",), "wgrad_dtype": "bfloat16"}
OTHER = {cls: fields | COMMON for cls, fields in OTHER.items()}
EACH_FIELD = [
    (cls, {field: value}) for cls, fields in OTHER.items() for field, value in fields.items()
]
SAMPLES = [cls() for cls in CLASSES]
SAMPLES += [cls(**fields) for cls, fields in EACH_FIELD]
SAMPLES += [cls(**fields) for cls, fields in OTHER.items()]


def test_the_samples_cover_every_field_and_recipe():
    assert CLASSES == recipes.RECIPES
    assert get_args(RecipeName) == tuple(NAMES)
    for cls in CLASSES:
        fields = dataclasses.fields(cls)
        assert {f.name for f in fields} == set(OTHER[cls])
        assert all(OTHER[cls][f.name] != f.default for f in fields)


def test_defaults():
    assert DelayedScaling() == DelayedScaling(0, "HYBRID", 16, "max", None)
    assert Float8CurrentScaling() == Float8CurrentScaling("HYBRID", None)
    assert RowwiseScaling() == RowwiseScaling("E4M3", "power_of_two", False)
    assert Float8BlockScaling() == Float8BlockScaling("E4M3", "power_of_two")
    assert MXFP8BlockScaling() == MXFP8BlockScaling("E4M3", "rceil", False)
    assert NVFP4BlockScaling() == NVFP4BlockScaling(True, True, True)
    assert Unscaled() == Unscaled("HYBRID")
    for cls in (DirectE5M2, Hybrid):
        assert cls() == cls(quantize_outputs=True, fused=(), stochastic_gradients=True)
    for cls in CLASSES:
        every_128 = cls is Float8BlockScaling
        assert cls().accumulation == ("f32_every_128" if every_128 else "f32")
        assert cls().fast_accumulation is None


def test_print_says_what_a_recipe_does():
    """Lines that are written by hand, from the page about recipes."""
    text = str(recipes.NVFP4BlockScaling())
    assert text.splitlines() == [
        "NVFP4BlockScaling()",
        "  fprop  E2M1FN per 1x16 and tensor x E2M1FN per 16x16 and tensor",
        "  dgrad  E2M1FN (stochastic) per 1x16 and tensor x E2M1FN per 16x16 and tensor",
        "  wgrad  Hadamard() of both, then E2M1FN per 1x16 and tensor x E2M1FN (stochastic) per "
        "1x16 and tensor",
        "  state: none",
        "  causal: no; batch-invariant: no",
    ]
    line = lambda recipe, i: str(recipe).splitlines()[i].strip()
    assert line(recipes.RowwiseScaling(), 1) == "fprop  E4M3FN per row x E4M3FN per row"
    assert line(recipes.RowwiseScaling(high_precision_wgrad=True), 3) == "wgrad  high precision"
    assert line(recipes.Float8BlockScaling(), 1) == "fprop  E4M3FN per 1x128 x E4M3FN per 128x128"
    assert line(recipes.Hybrid(), 1).endswith(" -> E4M3FN per tensor")
    assert line(recipes.Unscaled(), 4) == "state: none; needs a loss scale"
    assert (
        line(recipes.DelayedScaling(amax_history_len=3), 4) == "state: amaxes of the last 3 steps"
    )
    assert line(recipes.Unscaled(), 5) == "causal: yes; batch-invariant: yes"
    later = "once there is a history"
    assert line(recipes.DelayedScaling(), 5) == f"causal: {later}; batch-invariant: {later}"
    half = PerOperand(Product(Current(jfp8.E4M3FN), None), *[Product(None, None)] * 2)
    assert line(half, 1) == "fprop  E4M3FN per tensor x high precision"


def test_print_is_short_and_begins_with_the_call():
    for recipe in SAMPLES:
        lines = str(recipe).splitlines()
        assert lines[0] == repr(recipe)
        assert len(lines) == 6
        assert recipe._repr_html_() == f"<pre>{html.escape(str(recipe))}</pre>"


DELAYED = {"margin": 2, "algo": "most_recent", "scale_rounding": "power_of_two", "length": 7}
IN_BLOCKS = lambda *args: lambda fmt: Blockwise(fmt, *args)
# Quantizers of activations and gradients by their format, and of weights, where those are others.
UNIFORM = [
    (
        DelayedScaling(2, "HYBRID", 7, "most_recent", "power_of_two"),
        *(partial(Delayed, **DELAYED), None),
    ),
    (
        Float8CurrentScaling("HYBRID", "power_of_two"),
        *(partial(Current, scale_rounding="power_of_two"), None),
    ),
    (RowwiseScaling("HYBRID", None), Rowwise, None),
    (Float8BlockScaling("HYBRID"), *(IN_BLOCKS((128, n), "power_of_two") for n in (1, 128))),
    (MXFP8BlockScaling("HYBRID", "floor"), IN_BLOCKS((32, 1), "floor"), None),
    (MXFP8BlockScaling("HYBRID", "floor", True), *(IN_BLOCKS((32, n), "floor") for n in (1, 32))),
    (Unscaled("HYBRID"), Unit, None),
]


@pytest.mark.parametrize(("recipe", "others", "weights"), UNIFORM, ids=lambda x: str(x)[:9])
def test_each_tensor_has_its_quantizer_in_both_products(recipe, others, weights):
    lhs, rhs, grad = others(E4M3FN), (weights or others)(E4M3FN), others(E5M2)
    assert recipe.products() == Products(
        fprop=Product(lhs, rhs, fast_accumulation=True),
        dgrad=Product(grad, rhs),
        wgrad=Product(lhs, grad),
    )
    for name, fmt in (("E4M3", E4M3FN), ("E5M2", E5M2)):
        alike = dataclasses.replace(recipe, fp8_format=name).products()
        assert {q.fmt for q in alike.quantizers()} == {fmt}


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("outputs", [True, False])
def test_recipes_of_the_toolkit(outputs, stochastic):
    """Outputs are rounded like activations, the results of dgrad and wgrad like gradients."""
    grad = Unit(E5M2, rounding="stochastic" if stochastic else "nearest_even")
    for cls, forward in ((DirectE5M2, Unit(E5M2)), (Hybrid, Current(E4M3FN))):
        y, d = (forward, grad) if outputs else (None, None)
        products = cls(quantize_outputs=outputs, stochastic_gradients=stochastic).products()
        assert products == Products(
            fprop=Product(forward, forward, output=y, fast_accumulation=True),
            dgrad=Product(grad, forward, output=d),
            wgrad=Product(forward, grad, output=d),
        )


def test_what_holds_for_every_recipe():
    for recipe in SAMPLES:
        products = recipe.products()
        fast = [p.fast_accumulation for p in (products.fprop, products.dgrad, products.wgrad)]
        assert fast == [True, False, False]
        assert products == recipe.products()
        assert hash(products) == hash(recipe.products())
        nvfp4 = (NVFP4BlockScaling, NVFP4FourOverSix, NVFP4RowScaling)
        in_blocks = (Float8BlockScaling, MXFP8BlockScaling, MXFP4BlockScaling, *nvfp4)
        assert products.matrices == isinstance(recipe, (*in_blocks, QuantizationAware))
        at_random = getattr(recipe, "stochastic_rounding", False)
        at_random |= isinstance(recipe, MXFP4BlockScaling) and recipe.random_hadamard
        assert products.stochastic == getattr(recipe, "stochastic_gradients", at_random)
        assert (recipe.init_state() is not None) == isinstance(recipe, DelayedScaling)
        assert recipe.needs_loss_scale == isinstance(recipe, DirectE5M2 | Hybrid | Unscaled)


@pytest.mark.parametrize(
    ("patterns", "path", "fused"),
    [
        ((), "logits", False),
        (("logits",), "Block_0/logits", False),
        (("*/logits",), "a/b/logits", True),
        (("*/logits",), "logits", False),
        (("*/Logits",), "Block_0/logits", False),
        (("Block_*/query", "head"), "head", True),
        (("Block_[01]/*",), "Block_2/query", False),
    ],
)
def test_fused_layers_keep_their_results(patterns, path, fused):
    for cls in CLASSES:
        recipe = cls(**OTHER[cls])
        if cls in (DirectE5M2, Hybrid):
            recipe = dataclasses.replace(recipe, fused=patterns, quantize_outputs=True)
            expected = dataclasses.replace(recipe, quantize_outputs=not fused)
            assert recipe.for_layer(path) == expected
        else:
            assert recipe.for_layer(path) is recipe


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match=r"Recipe is abstract.*recipes\.DelayedScaling\(\)"):
        Recipe().products()
    assert str(Recipe()) == "Recipe()"


def test_get():
    for name, cls in NAMES.items():
        assert recipes.get(name) == recipes.get(cls.__name__) == cls()
        assert recipes.get(name, **OTHER[cls]) == cls(**OTHER[cls])
        assert cls.name == name


@pytest.mark.parametrize("name", ["Delayed", "", "Recipe", "PerOperand", "_Toolkit", None])
def test_get_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=f"no recipe called {name!r}") as error:
        recipes.get(name)
    for short, cls in NAMES.items():
        assert f'"{short}" ({cls.__name__})' in str(error.value)


def test_json_is_a_flat_object():
    for name, cls in NAMES.items():
        assert recipes.from_json(json.dumps({"recipe": name})) == cls()
    for recipe in SAMPLES:
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(recipe).items()}
        if isinstance(fields.get("weights"), Blockwise):
            assert json.loads(recipe.to_json())["weights"]["class"] == "Blockwise"
            continue
        assert json.loads(recipe.to_json()) == {"recipe": type(recipe).__name__, **fields}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("DelayedScaling", ValueError, r"Not JSON.*to_json\(\)"),
        ("[]", ValueError, r'object such as \{"recipe": "DelayedScaling".*got'),
        pytest.param('{"a":' * 100_000 + "1" + "}" * 100_000, ValueError, "deep", id="deep"),
        ('{"recipe": 3}', ValueError, "object such as"),
        ('{"recipe": "fp4"}', ValueError, "no recipe called 'fp4'.*DelayedScaling"),
        ('{"recipe": "delayed", "history": 3}', TypeError, "no field 'history'.*Fields: .*margin"),
        ('{"recipe": "delayed", "margin": true}', TypeError, "margin=True.*must be an int"),
        ('{"recipe": "current", "fp8_format": ["E4M3"]}', ValueError, "allowed are 'HYBRID'"),
        ('{"recipe": "PerOperand"}', TypeError, "missing 3 required .*fprop"),
        ('{"recipe": "PerOperand", "fprop": 3, "dgrad": 3, "wgrad": 3}', TypeError, "Product"),
    ],
)
def test_from_json_errors(text, error, words):
    with pytest.raises(error, match=words):
        recipes.from_json(text)


def test_unknown_field():
    """Other names, in Python and JSON, are in tests/properties."""
    cls, name = DelayedScaling, "amax_histroy_len"
    for make in (cls, partial(recipes.get, cls.name), partial(dataclasses.replace, cls())):
        with pytest.raises(TypeError, match=f"no field '{name}'. Did you mean 'amax_history_len'?"):
            make(**{name: 1})
    with pytest.raises(TypeError, match=r"has no field 'hadamard_random'\. Fields: "):
        NVFP4BlockScaling(hadamard_random=True)


NO_CHOICE = ["hybrid", "RCEIL", 0, False, "", jfp8.E4M3FN]
NO_INT = (TypeError, "must be an int", [True, 16.0, "16", None])
OF_QAT = "allowed are 'block', 'rowwise', 'mxfp8'"
# Errors, their words, and what is refused, of each field that is not True or False.
WRONG = {
    "amax_history_len": [NO_INT, (ValueError, "from 1 to 1048576", [0, 2**20 + 1])],
    "margin": [NO_INT, (ValueError, "from 0 to 32", [-1, 33])],
    "fp8_format": [(ValueError, "allowed are 'HYBRID', 'E4M3', 'E5M2'", NO_CHOICE)],
    "amax_compute_algo": [(ValueError, "allowed are 'max', 'most_recent'", NO_CHOICE)],
    "scale_rounding": [(ValueError, "allowed are None, 'power_of_two'", ["rceil", *NO_CHOICE])],
    "weights": [(ValueError, OF_QAT, [None, *NO_CHOICE])],
    "activations": [(ValueError, OF_QAT, NO_CHOICE)],
    "backward": [(ValueError, "allowed are 'dequantized', 'high_precision'", NO_CHOICE)],
    "accumulation": [
        (ValueError, "allowed are 'f32', 'f32_every_128', 'hopper', 'hopper_every_128'", NO_CHOICE)
    ],
    "fast_accumulation": [
        (ValueError, "None or a tuple with any of 'fprop', 'dgrad', 'wgrad'", ["fprop", ({},), 1])
    ],
    "wgrad_dtype": [(ValueError, "allowed are None, 'bfloat16'", ["float32", *NO_CHOICE])],
    "fused": [(TypeError, "must be a tuple of patterns, such as (", ["*/logits", (1,), None])],
}
MX_ROUNDING = [(ValueError, "allowed are 'rceil', 'floor', 'ceil', 'even'", [None, *NO_CHOICE])]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_field_refuses_what_is_no_value_of_it(cls):
    wrong = dict(WRONG)
    if cls in (MXFP8BlockScaling, MXFP4BlockScaling):
        wrong["scale_rounding"] = MX_ROUNDING
    no_bool = [(TypeError, "must be True or False", [1, None, "True", np.bool_(True)])]
    for field in OTHER[cls]:
        for error, words, values in wrong.get(field, no_bool):
            for value in values:
                with pytest.raises(error, match=re.escape(words)) as raised:
                    cls(**{field: value})
                assert f"{cls.__name__}({field}={value!r})" in str(raised.value)


@pytest.mark.parametrize("fast", [(), ("wgrad",), ("fprop", "dgrad", "wgrad")])
def test_fast_accumulation_overrides_each_product(fast):
    for cls in CLASSES:
        chosen, plain = cls(fast_accumulation=fast).resolved(), cls().products()
        for kind in ("fprop", "dgrad", "wgrad"):
            product = getattr(chosen, kind)
            assert product.fast_accumulation is (kind in fast)
            kept = getattr(plain, kind)
            assert dataclasses.replace(product, fast_accumulation=kept.fast_accumulation) == kept


Q = Current(E4M3FN)
PLAIN = Product(Q, Q)


def per_operand(fprop=PLAIN, dgrad=PLAIN, wgrad=PLAIN, **fields):
    return PerOperand(fprop, dgrad, wgrad, **fields)


def test_histories_of_the_tensors_that_want_one():
    long, short = Delayed(E4M3FN, length=5), Delayed(E5M2, length=3)
    recipe = per_operand(Product(long, Q), Product(short, Q), Product(long, short))
    state = recipe.init_state()
    assert {role: s["amax_history"].shape for role, s in state.items()} == {
        "lhs": (5,),
        "rhs": (1,),
        "grad": (3,),
    }
    once = per_operand(Product(long, Q), Product(short, Q), Product(None, Q))
    assert once.init_state()["lhs"]["amax_history"].shape == (5,)
    assert per_operand().init_state() is None


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("current", TypeError, r"must be a quantizer such as jfp8\.quantizers\.Current.*'current'"),
        (Current, TypeError, r"must be a quantizer such as .*got <class"),
        (Current(jfp8.E8M0FNU), ValueError, "E8M0FNU has no sign and no zero: it holds scales"),
    ],
    ids=repr,
)
def test_error_no_quantizer(given, error, words):
    for what in ("lhs", "rhs", "output"):
        with pytest.raises(error, match=rf"^{what}.*{words}"):
            Product(**({"lhs": Q, "rhs": Q} | {what: given}))


REFUSED = {
    "different stretches": (
        {"lhs": Blockwise(E4M3FN, (32, 1)), "rhs": Blockwise(E4M3FN, (128, 128))},
        r"lhs has blocks of 32 along the contraction and rhs of 128.*both blocks of 32",
    ),
    "two-level and one-level": (
        {"lhs": TwoLevel(E2M1FN, (16, 16)), "rhs": Blockwise(E4M3FN, (32, 1))},
        r"lhs has blocks of 16 along the contraction and rhs of 32",
    ),
    "two 2-D blocks": (
        {"lhs": Blockwise(E4M3FN, (128, 128)), "rhs": Blockwise(E4M3FN, (128, 128))},
        r"two-dimensional blocks, \(128, 128\) and \(128, 128\).*blocks of \(128, 1\)",
    ),
    "rotation of nothing": (
        {"lhs": None, "rhs": None, "rotation": Hadamard()},
        "rotation without a quantized operand changes nothing",
    ),
    "rotation with a history": (
        {"lhs": Q, "rhs": Delayed(E4M3FN), "rotation": Hadamard()},
        "rotation with an amax history: the history belongs to the original tensor",
    ),
    "output in blocks": (
        {"output": Blockwise(E4M3FN, (128, 128))},
        r"output=Blockwise.*no contraction along which scales could vary.*Current",
    ),
    "output per row": (  # there is a scale for every element then, which is no quantization
        {"output": Rowwise(E4M3FN)},
        r"output=Rowwise.*no contraction along which scales could vary.*Current",
    ),
    "output with a history": (
        {"output": Delayed(E4M3FN)},
        r"output=Delayed.*no amax history.*Current",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_error_product(case):
    fields, words = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s){words}"):
        Product(**({"lhs": Q, "rhs": Q} | fields))


def test_products_that_are_allowed():
    tile, stretch = Blockwise(E4M3FN, (128, 128)), Blockwise(E4M3FN, (128, 1))
    for allowed in ((tile, stretch), (stretch, tile), (tile, Q), (None, tile), (stretch, stretch)):
        Product(*allowed, output=Unit(E5M2), rotation=None)


@pytest.mark.parametrize("rotation", [True, "hadamard", Hadamard, (1, -1)], ids=str)
def test_error_no_rotation(rotation):
    with pytest.raises(TypeError, match=r"rotation must be a Hadamard\(\), a Ran.* or None, got"):
        Product(Q, Q, rotation=rotation)


@pytest.mark.parametrize("make", [Products, per_operand])
def test_error_no_product(make):
    for which in ("fprop", "dgrad", "wgrad"):
        products = {"fprop": PLAIN, "dgrad": PLAIN, "wgrad": PLAIN}
        with pytest.raises(TypeError, match=rf"^{which} must be a recipes\.Product, got"):
            make(**(products | {which: Q}))
    nothing = Product(None, None)
    with pytest.raises(ValueError, match=r"Nothing is quantized.*without jfp8"):
        make(nothing, nothing, nothing)
    make(nothing, nothing, Product(None, Q))


@pytest.mark.parametrize("make", [Products, per_operand])
@pytest.mark.parametrize("role", ["lhs", "rhs", "grad"])
def test_error_two_histories_of_one_tensor(make, role):
    one, other = Delayed(E4M3FN, length=4), Delayed(E4M3FN, length=8)
    products = {
        "lhs": lambda one, other: (Product(one, Q), PLAIN, Product(other, Q)),
        "rhs": lambda one, other: (Product(Q, one), Product(Q, other), PLAIN),
        "grad": lambda one, other: (PLAIN, Product(other, Q), Product(Q, one)),
    }[role]
    with pytest.raises(ValueError, match=rf"^{role} would need .*lengths \[4, 8\].*one history"):
        make(*products(one, other))
    make(*products(one, dataclasses.replace(one, fmt=E5M2)))  # another format, but equally long
    make(*products(one, None))


@dataclasses.dataclass(frozen=True)
class Shifted(Quantizer):
    """A user's own: the scale is 2^shift. It has a tuple, to see that this stays one."""

    shift: int = 0
    others: tuple = (E3M4, (E5M2, 1.5))

    def __call__(self, x, context: Context):
        return self.data_for(x, jnp.full((), 2.0**self.shift), context)


def test_error_a_quantizer_with_an_array():
    """Equal quantizers share a trace, so JAX must be able to hash them."""
    words = r"^rhs: this Shifted is not hashable.*tuple\(x\.tolist\(\)\)"
    with pytest.raises(TypeError, match=words):
        Product(Q, Shifted(E4M3FN, others=np.ones(2)))


@dataclasses.dataclass(frozen=True)
class MyRecipe(Recipe):
    """A user's own, without a name."""

    first: Quantizer = Shifted(E4M3FN)
    count: int = 3

    def products(self):
        return Products(Product(self.first, self.first), PLAIN, PLAIN)


@dataclasses.dataclass(frozen=True)
class NamedRecipe(MyRecipe):
    name = "mine"


def test_json_names_classes_and_formats():
    recipe = per_operand(
        Product(Current(E4M3FN), Rowwise(E5M2), fast_accumulation=True),
        wgrad=Product(
            Blockwise(E4M3FN, (16, 1), "even"),
            TwoLevel(E2M1FN, (16, 16), scale_fmt=E5M2, rounding="stochastic"),
            rotation=Hadamard((1, -1, -1, 1)),
        ),
    )
    fields = json.loads(recipe.to_json())
    common = {"accumulation", "fast_accumulation", "wgrad_dtype"}
    assert set(fields) == {"recipe", "fprop", "dgrad", "wgrad"} | common
    assert fields["wgrad"]["rhs"] == {
        "class": "TwoLevel",
        "fmt": {"class": "Format", "name": "E2M1FN"},
        "rounding": "stochastic",
        "block_size": [16, 16],
        "scale_fmt": {"class": "Format", "name": "E5M2"},
        "targets": [],
        "reach": None,
        "outer": "tensor",
    }
    assert fields["wgrad"]["rotation"] == {"class": "Hadamard", "signs": [1, -1, -1, 1]}
    assert fields["fprop"]["fast_accumulation"] is True


def test_json_of_a_users_own_classes():
    mine = Shifted(E5M2, 3, rounding="toward_zero")
    recipe = per_operand(fprop=Product(mine, Q, output=None))
    text = recipe.to_json()
    assert recipes.from_json(text, known=[Shifted]) == recipe
    assert recipes.from_json(text, known=(MyRecipe, Shifted)) == recipe
    with pytest.raises(ValueError, match=r"'Shifted' is not a class of jfp8.*known=\["):
        recipes.from_json(text)
    for own in (MyRecipe(mine), NamedRecipe(mine, 4, accumulation="hopper")):
        assert recipes.from_json(own.to_json(), known=[Shifted, type(own)]) == own
        with pytest.raises(ValueError, match=rf"no recipe called '{type(own).__name__}'"):
            recipes.from_json(own.to_json(), known=[Shifted])
    assert recipes.from_json('{"recipe": "mine"}', known=[Shifted, NamedRecipe]) == NamedRecipe()
    with pytest.raises(ValueError, match=r"no recipe called 'nope'.*DelayedScaling"):
        recipes.from_json('{"recipe": "nope"}', known=[MyRecipe])


def test_json_errors_inside_of_products():
    fields = json.loads(per_operand().to_json())
    fields["fprop"]["lhs"]["fmt"]["name"] = "E9M9"
    with pytest.raises(ValueError, match="no format called 'E9M9'. Formats: E4M3FN, E5M2, E3M4"):
        recipes.from_json(json.dumps(fields))
    fields = json.loads(per_operand().to_json())
    fields["dgrad"]["rhs"] = {"class": "Currant", "fmt": {"class": "Format", "name": "E5M2"}}
    with pytest.raises(ValueError, match=r"'Currant' is not a class of jfp8"):
        recipes.from_json(json.dumps(fields))
    fields["dgrad"]["rhs"] = {"class": "Current", "fmt": {"class": "Format", "name": "E8M0FNU"}}
    with pytest.raises(ValueError, match="E8M0FNU has no sign"):
        recipes.from_json(json.dumps(fields))
