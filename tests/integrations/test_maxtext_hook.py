"""`jfp8.integrations.maxtext` on stand-ins for the functions of MaxText 0.2.5."""

import importlib
import sys
from functools import wraps
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jfp8
from jfp8.layers.linen.state_in_gradients import histories_in
from jfp8.products.ragged.dot import scaled_ragged_dot

STATE = "_overwrite_with_gradient"


class Fp8Quantization:
    """MaxText's base class."""

    needs_apply_rngs = False
    quant_mode = "train"


class Router:
    def __init__(self, *, quant=None):
        self.quant = quant


class Config:
    """MaxText's: a class of pydantic's, of which `enabled` uses this much."""

    model_fields = {"quantization": SimpleNamespace(annotation=str | None, default="")}


def initialize(argv, config_class=Config):
    del argv
    return config_class


def configure_quantization(config, quant_mode_str="train"):
    return (config.quantization, quant_mode_str)


def gmm(lhs, rhs, group_sizes, preferred_element_type=None, **options):
    return options


def gradient_accumulation_loss_and_grad(
    loss_fn, config, model, params, params_shardings, data, rng
):
    """As MaxText's: sums gradients by parameters over micro-batches, and divides by the tokens."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    jax.tree.map(lambda param, sharding: None, params, params_shardings)  # the same structure

    @wraps(loss_fn)
    def scaled(*args, **more):
        loss, aux = loss_fn(*args, **more)
        return loss * 0.125, aux

    def add(carry, batch):
        total, rest = carry
        local = nnx.merge(graph, params, rest, copy=True)
        gradient = nnx.value_and_grad(scaled, argnums=0, has_aux=True)
        (_, aux), grads = gradient(local, config, batch, None, None, is_train=True)
        return (jax.tree.map(jnp.add, total, grads), nnx.split(local, nnx.Param, ...)[2]), aux

    zeros = jax.tree.map(jnp.zeros_like, params)
    (grads, rest), aux = jax.lax.scan(add, (zeros, rest), data)
    nnx.update(model, rest)
    return 0.0, aux, jax.tree.map(lambda g: g / 3.0, grads)


@pytest.fixture
def maxtext(monkeypatch):
    """Stand-ins for the modules of MaxText, by their last names."""
    kernels = SimpleNamespace(gmm=gmm)
    names = {
        "configs.types": {"MaxTextConfig": Config},
        "configs.pyconfig": {"initialize": initialize},
        "layers.quantizations": {
            "Fp8Quantization": Fp8Quantization,
            "configure_quantization": configure_quantization,
        },
        "layers.moe": {"GateLogit": Router, "mblx": kernels},
        "trainers.pre_train.train": {
            "gradient_accumulation_loss_and_grad": gradient_accumulation_loss_and_grad
        },
    }
    modules = {"maxtext": ModuleType("maxtext")}
    for path, content in names.items():
        parts = ["maxtext", *path.split(".")]
        for i in range(1, len(parts)):
            name, parent = ".".join(parts[: i + 1]), ".".join(parts[:i])
            modules.setdefault(name, ModuleType(name))
            setattr(modules[parent], parts[i], modules[name])
        vars(modules[".".join(parts)]).update(content)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield SimpleNamespace(**{name.split(".")[-1]: m for name, m in modules.items()})
    for name in [n for n in sys.modules if n.startswith("jfp8.integrations.maxtext")]:
        del sys.modules[name]


def part(name):
    return importlib.import_module(f"jfp8.integrations.maxtext.{name}")


def config(name, **options):
    defaults = {"num_experts": 1, "sparse_matmul": True, "megablox": True, "use_tokamax_gmm": False}
    given = {"quantization": name, "quant_cfg_path": ""} | defaults | options
    return SimpleNamespace(**given)


def test_names_are_taken_inside_and_only_there(maxtext):
    enabled = part("enabled").enabled
    with enabled():
        allowed = maxtext.pyconfig.initialize([]).__annotations__["quantization"]
        assert "jfp8_mxfp8" in [member.value for member in allowed.__args__[-1]]
        quant = maxtext.quantizations.configure_quantization(config("jfp8_mxfp8"))
        assert quant.recipe == jfp8.recipes.MXFP8BlockScaling()
        assert isinstance(quant, Fp8Quantization)
        assert maxtext.quantizations.configure_quantization(config("fp8")) == ("fp8", "train")
        assert maxtext.moe.GateLogit(quant=quant).quant is None
        assert maxtext.moe.GateLogit(quant="fp8").quant == "fp8"
        with pytest.raises(RuntimeError, match="leave out the inner one"), enabled():
            pass
        assert maxtext.moe.mblx.gmm is not gmm
    with pytest.raises(KeyError), enabled():  # an error puts everything back, too
        raise KeyError
    assert maxtext.pyconfig.initialize is initialize
    assert maxtext.quantizations.configure_quantization is configure_quantization
    assert maxtext.moe.GateLogit is Router
    assert maxtext.moe.mblx.gmm is gmm
    after = maxtext.train.gradient_accumulation_loss_and_grad
    assert after is gradient_accumulation_loss_and_grad


def test_recipes_by_name_and_from_a_file(maxtext, tmp_path):
    for each in jfp8.recipes.registry.RECIPES:
        assert part("quantization").configured(config(f"jfp8_{each.name}")).recipe == each()
    recipe = jfp8.recipes.DelayedScaling(amax_history_len=32, margin=1)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    given = config("jfp8_file", quant_cfg_path=str(tmp_path / "recipe.json"))
    assert part("quantization").configured(given).recipe == recipe
    with pytest.raises(ValueError, match="needs quant_cfg_path=FILE"):
        part("quantization").configured(config("jfp8_file"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_qwix_quantization": True}, "Set use_qwix_quantization=False"),
        ({"te_moe_block": True}, "Set te_moe_block=False"),
        ({"use_m3_model": True}, "Set use_m3_model=False"),
        ({"num_experts": 8, "megablox": False}, "megablox=True use_tokamax_gmm=False"),
        ({"num_experts": 8, "use_tokamax_gmm": True}, "or sparse_matmul=False"),
    ],
)
def test_ways_around_the_hook_are_refused(maxtext, options, message):
    with pytest.raises(ValueError, match=message):
        part("quantization").configured(config("jfp8_current", **options))
    with pytest.raises(ValueError, match="is for training; got the mode 'serve'"):
        part("quantization").configured(config("jfp8_current"), "serve")


def test_grouped_products_without_histories_are_said(maxtext):
    with pytest.warns(UserWarning, match="not by histories"):
        part("quantization").configured(config("jfp8_delayed", num_experts=8))
    part("quantization").configured(config("jfp8_delayed", num_experts=8, sparse_matmul=False))
    part("quantization").configured(config("jfp8_current", num_experts=8))


def arrays(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def test_grouped_products_multiply_by_the_recipe(maxtext):
    x, w = arrays((32, 16), (2, 16, 8))
    sizes, recipe = jnp.array([20, 8]), jfp8.recipes.Float8CurrentScaling()
    multiply = part("enabled").multiplying(gmm)
    given = {"lhs_quantize_dtype": recipe, "rhs_quantize_dtype": recipe}
    y = multiply(x, w, sizes, jnp.float32, group_offset=0, tiling=(1,), **given)
    np.testing.assert_array_equal(y, scaled_ragged_dot(x, w, sizes, recipe=recipe))
    assert multiply(x, w, sizes, lhs_quantize_dtype="int8") == {"lhs_quantize_dtype": "int8"}
    with jfp8.autocast(enabled=False):
        assert multiply(x, w, sizes, **given) == {"rhs_quantize_dtype": None}
    with pytest.raises(NotImplementedError, match="no group offset"):
        multiply(x, w, sizes, group_offset=jnp.int32(1), **given)


def test_einsums_with_weights_are_fp8_and_those_with_masks_are_not(maxtext):
    einsum = part("quantization").ExpertEinsum(jfp8.recipes.Float8CurrentScaling(), jnp.float32)
    x, w, mask = arrays((2, 3, 8), (4, 8, 5), (2, 3, 4, 6))
    exact = jnp.einsum("BSM,BSEC -> EBCM", x, mask)
    np.testing.assert_array_equal(einsum.apply({}, "BSM,BSEC -> EBCM", x, mask), exact)
    y = einsum.apply({}, "BSM,EMH -> BSEH", x, w)
    quantized = jfp8.scaled_dot_general(
        x, w, (((2,), (1,)), ((), ())), recipe=jfp8.recipes.Float8CurrentScaling()
    )
    np.testing.assert_allclose(y, quantized, rtol=1e-6)
    assert not np.array_equal(y, jnp.einsum("BSM,EMH -> BSEH", x, w))
    delayed = part("quantization").Quantization(jfp8.recipes.DelayedScaling()).einsum()
    assert set(delayed.init(jax.random.key(0), "ab,bc->ac", *arrays((1, 1), (1, 1)))) == {STATE}


class Layers(nnx.Module):
    """As MaxText's `DenseGeneral`: a Linen product in a bridge, initialized when it is made."""

    def __init__(self, quant, count):
        self.kernels = nnx.List([nnx.Param(w) for w in arrays(*[(8, 8)] * count)])
        make = lambda: nnx.bridge.ToNNX(quant.dot_general_cls(mesh_axes=())(), rngs=nnx.Rngs(0))
        dims = (((1,), (0,)), ((), ()))
        self.dims, x = dims, jnp.zeros((1, 8))
        self.products = nnx.List([make().lazy_init(x, k[...], dims) for k in self.kernels])

    def __call__(self, x):
        for kernel, product in zip(self.kernels, self.products):
            x = product(x, kernel[...], self.dims, mutable=["aqt"])
        return x


def states(model):
    found = nnx.state(model, nnx.variable_type_from_name(STATE, allow_register=True))
    return [histories_in({"state": x}) for x in jax.tree.leaves(found)]


def loss_of(model, config, data, rng, params, is_train=True):
    y = model(data)
    return jnp.sum(y * y), {"norm": jnp.sum(y)}


def test_accumulation_makes_one_entry_of_all_micro_batches(maxtext):
    """Oracle: `jnp.max`."""
    without = Layers(part("quantization").configured(config("jfp8_current")), 1)
    assert not states(without)
    given = (1, 2, without, 4, 5, 6, 7)
    assert part("enabled").accumulating(lambda *args: args)(*given) == given
    model = Layers(part("quantization").configured(config("jfp8_delayed")), 3)
    (x,) = arrays((4, 3, 8))
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: whole, nnx.state(model, nnx.Param))
    accumulate = part("enabled").accumulating(gradient_accumulation_loss_and_grad)

    @nnx.jit
    def step(model):
        return accumulate(loss_of, None, model, None, shardings, x, None)[2]

    grads = step(model)
    assert set(grads) == {"kernels"}
    assert not hasattr(model, "jfp8_state")
    for history, kernel in zip(states(model), model.kernels, strict=True):
        entries = history["rhs"]["amax_history"]
        np.testing.assert_allclose(entries[0], jnp.max(jnp.abs(kernel[...])), rtol=1e-6)
        assert not entries[1:].any()
        assert history["grad"]["amax_history"][0] > 0
    largest = jnp.max(jnp.abs(x))
    first = states(model)[0]["lhs"]["amax_history"][0]
    assert largest * (1 - 1e-6) <= first <= largest * 9 / 8
    step(model)
    assert all((h["lhs"]["amax_history"] > 0).sum() == 2 for h in states(model))
