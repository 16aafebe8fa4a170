"""Compare the errors of every matmul under two recipes, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jfp8.conversion.models import convert
from jfp8.conversion.program import arrays_apart
from jfp8.conversion.selection import Choice
from jfp8.conversion.tables import Printed, Table, ruled_lines
from jfp8.debug.measurement import Measurement
from jfp8.debug.reading import by_layer
from jfp8.debug.records import OPERANDS
from jfp8.debug.stats import Stats, name_products, observed
from jfp8.layers.nnx.products import Product as ConvertedProduct
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.observers import Observer, tap
from jfp8.products.operation import Kind, Operand, Operation, Options, QuantizedOperand, Use, sums
from jfp8.products.seeds import rotation_seed
from jfp8.quantizers.from_forward import FromForward
from jfp8.quantizers.quantizer import Quantizer
from jfp8.recipes.in_effect import overriding
from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.scales import amax

_PARTS = ("total", "cast", "product")  # fields of `ProductError`


@dataclass(frozen=True)
class ProductError:
    """Relative Frobenius errors of a product against high precision, on the same inputs.

    Attributes:
      total: ``|y' - y| / |y|``, where ``y'`` is the product under the recipe.
      cast: ``|y* - y| / |y|``, from rounding operands: ``y*`` is their product in high precision.
      product: ``|y' - y*| / |y|``, from accumulation, and from quantizing results.
    """

    total: float
    cast: float
    product: float


@dataclass(frozen=True)
class ComparedProduct:
    """One product of a layer under both recipes.

    Attributes:
      path, index: place of the layer; see `TensorStats`.
      product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
      a, b: its errors.
    """

    path: str
    index: tuple[int, ...]
    product: str
    a: ProductError
    b: ProductError

    @property
    def layer(self) -> str:
        """Return the path with the index: ``"blocks/Dense_0[3]"``."""
        return self.path + "".join(f"[{i}]" for i in self.index)


@dataclass(frozen=True)
class ComparedGradient:
    """Gradient of the whole model with respect to one parameter, under each recipe.

    Attributes:
      path: place of the parameter, ``"Dense_0/kernel"``.
      error_a, error_b: relative Frobenius error against the gradient in high precision.
      cosine_a, cosine_b: cosine of the angle between the two.
    """

    path: str
    error_a: float
    error_b: float
    cosine_a: float
    cosine_b: float


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """Result of `compare`; prints as tables.

    Attributes:
      recipe_a, recipe_b: the recipes.
      products: every product on its inputs in high precision, in program order.
      gradients: gradients of the whole model, in which errors of all layers add up.
      loss, loss_a, loss_b: in high precision and under each recipe.
    """

    recipe_a: Recipe
    recipe_b: Recipe
    products: tuple[ComparedProduct, ...]
    gradients: tuple[ComparedGradient, ...]
    loss: float
    loss_a: float
    loss_b: float

    def worst(self, n: int = 5) -> tuple[ComparedProduct, ...]:
        """Return the `n` products with the largest total error under either recipe, in order."""
        error = lambda e: math.inf if math.isnan(e.total) else e.total
        return tuple(sorted(self.products, key=lambda row: -max(error(row.a), error(row.b)))[:n])

    def __str__(self) -> str:
        lines = [f"a = {self.recipe_a!r}", f"b = {self.recipe_b!r}", ""]
        for table in self._tables():
            lines += [*ruled_lines(table), ""]
        losses = f"a {self.loss_a:.6g}, b {self.loss_b:.6g}"
        return "\n".join([*lines, f"loss: {self.loss:.6g} in high precision, {losses}"])

    def _tables(self) -> tuple[Table, Table]:
        percent = lambda error: f"{100 * error:.3g} %"
        products = [("layer", "product", *(f"{part} {name}" for name in "ab" for part in _PARTS))]
        for row in self.products:
            errors = [getattr(error, part) for error in (row.a, row.b) for part in _PARTS]
            products.append((row.layer or "(no layer)", row.product, *map(percent, errors)))
        gradients = [("gradient by", "error a", "error b", "cosine a", "cosine b")]
        for g in self.gradients:
            cosines = (f"{g.cosine_a:.5f}", f"{g.cosine_b:.5f}")
            gradients.append((g.path, percent(g.error_a), percent(g.error_b), *cosines))
        return products, gradients


class _NothingQuantized(Products):
    """Compute in high precision, with operands laid out so that any recipe could take them."""

    def __post_init__(self) -> None:
        """Leave out the check that something is quantized."""

    @property
    def matrices(self) -> bool:
        return True


@dataclass(frozen=True)
class _HighPrecision(Recipe):
    """Compute the products of a model by this library, without quantizing anything."""

    name: ClassVar[str] = "high precision"

    def products(self) -> Products:
        return _NothingQuantized(*[Product(None, None)] * 3)


def product_by(
    recipe: Recipe, operation: Operation, kind: Kind, first: jax.Array, second: jax.Array
) -> tuple[jax.Array, Operand, Operand]:
    """Return a matmul of this kind under `recipe`, without state, and its two operands."""
    product: Product = getattr(recipe.resolved(), kind)
    quantizers, contracting = (product.lhs, product.rhs), operation.contracting(kind)
    given = zip((first, second), OPERANDS[kind], quantizers, contracting, strict=True)
    rotated_by = rotation_seed(product, kind, amax(first), None)
    fprop, of_forward = recipe.resolved().fprop, operation.contracting("fprop")

    def operand(x: jax.Array, role: str, quantizer: Quantizer | None, summed: Any) -> Operand:
        use = Use(kind, product, quantizer, summed, rotation_seed=rotated_by)
        source = QuantizedOperand(role, x, None, None, operation)
        if not isinstance(quantizer, FromForward):
            return source.quantized(use, None)[0]
        i = OPERANDS["fprop"].index(role)
        before = Use("fprop", fprop, (fprop.lhs, fprop.rhs)[i], of_forward[i])
        again = source.quantized(before, use)[1]
        assert again is not None
        return again

    q_first, q_second = (operand(*parts) for parts in given)
    y = operation.multiply(kind, q_first, q_second, sums(Options(recipe), kind))
    y = y if product.output is None else operation.stored(kind, product.output, y, None)
    return y, q_first, q_second


@dataclass(frozen=True)
class _Errors(Measurement):
    """Measure the errors of one product under two recipes, from high-precision operands.

    Sums squares of ``y``, and per recipe of ``y' - y``, ``y* - y``, ``y' - y*``; see `compare`.
    """

    powers: ClassVar = ("signal", *(f"{part}_{i}" for i in range(2) for part in _PARTS))
    maxima: ClassVar[tuple[str, ...]] = ("amax",)

    structure: jax.tree_util.PyTreeDef  # the operation's
    kind: Kind
    recipes: tuple[Recipe, Recipe]

    def __call__(
        self, y: jax.Array, first: jax.Array, second: jax.Array, *arrays: jax.Array
    ) -> jax.Array:
        operation: Operation = self.structure.unflatten(arrays)
        with jax.default_matmul_precision("highest"):
            multiply = lambda a, b: operation.multiply(self.kind, a, b, MatmulSpec())
            y = multiply(first, second).astype(jnp.float32)
            amax = jnp.max(jnp.abs(y), initial=0.0)
            to_units = 1.0 / jnp.maximum(amax, np.finfo(np.float32).tiny)
            power = lambda x: jnp.sum((x * to_units) ** 2)
            powers = [power(y)]
            for recipe in self.recipes:
                of_recipe, *operands = product_by(recipe, operation, self.kind, first, second)
                of_recipe = of_recipe.astype(jnp.float32)
                wide = (scaled_values(x) if isinstance(x, ScaledArray) else x for x in operands)
                represented = multiply(*wide).astype(jnp.float32)
                errors = (of_recipe - y, represented - y, of_recipe - represented)
                powers += map(power, errors)
        return jnp.stack([*powers, amax])


@dataclass(frozen=True)
class _Comparer(Observer):
    """Tap every product of operands in high precision; others have weights stored in FP8."""

    recipes: tuple[Recipe, Recipe]

    def multiplied(
        self, operation: Any, kind: Any, first: Any, second: Any, y: jax.Array
    ) -> jax.Array:
        if isinstance(first, ScaledArray) or isinstance(second, ScaledArray):
            return y
        arrays, structure = jax.tree.flatten(operation)
        forward = kind == "fprop"
        weight = 2 if forward else None
        errors = _Errors(structure, kind, self.recipes, weight=weight, forward=forward)
        return tap(y, first, second, *arrays, measure=errors)


def compare(
    model: nn.Module | nnx.Module,
    recipe_a: RecipeLike,
    recipe_b: RecipeLike,
    batch: Any,
    *,
    variables: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], jax.Array] | None = None,
    exempt: Choice | Sequence[Choice] | None = None,
    only: Choice | Sequence[Choice] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compare the errors of a model's matmuls under two recipes, layer by layer. ::

        total   |y' - y|  / |y|     y   the product in high precision
        cast    |y* - y|  / |y|     y'  the product under the recipe
        product |y' - y*| / |y|     y*  in high precision, of the operands as the recipe rounds them

    The model runs in high precision, and each of its products, forward and backward, is also
    computed under both recipes on the same inputs, so that errors do not add up from layer to
    layer. In addition, the whole model runs under each recipe, for its loss and its gradients.
    Scales follow from the tensors themselves, without histories. Attention in FP8 takes part in
    loss and gradients, and has no rows: `stats` measures its operands.

    Args:
      model: a Linen or NNX module: plain Flax, converted, or with layers of jfp8. Flax's layers
        take part as in `jfp8.convert`; layers of jfp8 all do, also those with their own recipe.
      recipe_a, recipe_b: recipes, or names of them.
      batch: arguments of the model: a tuple, a dict of named arguments, or a single argument.
      variables: for Linen, the result of ``model.init``; None initializes from seed 0.
      loss_fn: takes the model's output and returns the loss to differentiate. None:
        ``mean(y^2) / 2`` of all floating outputs.
      exempt, only: see `jfp8.convert`.
      **kwargs: further arguments of the model, such as ``train=True``; for Linen also ``rngs=``
        and ``method=`` of ``model.apply``.

    Returns:
      A `Comparison`: ``print`` it, or read ``.products``, ``.gradients``, ``.worst()``.

    Raises:
      TypeError: `model` is not a model; a recipe is not one.
      ValueError: an unknown name of a recipe; no product of the model belongs to a layer that takes
        part.

    >>> import flax.linen as nn, jax.numpy as jnp, jfp8
    >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    >>> x = jax.random.normal(jax.random.key(1), (64, 16))
    >>> found = jfp8.debug.compare(model, "current", "nvfp4", x)
    >>> [(row.layer, row.product, row.a.total < row.b.total) for row in found.products]
    [('layers_0', 'fprop', True), ('layers_0', 'wgrad', True)]
    """
    recipes = (check_recipe(recipe_a), check_recipe(recipe_b))
    if isinstance(batch, Mapping):
        arguments, kwargs = (), {**batch, **kwargs}
    else:
        arguments = batch if isinstance(batch, tuple) else (batch,)
    loss_fn = loss_fn or _half_mean_square
    if isinstance(model, nn.Module):
        variables = _linen_variables(model, variables, arguments, kwargs)
    elif isinstance(model, nnx.Module):
        model = _without_recipes(model)
    else:
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a Flax Linen or NNX module, got {given}.")

    def under(recipe: Recipe) -> tuple[Callable[[Any], jax.Array], Any]:
        converted = convert(cast(Any, model), recipe, exempt=exempt, only=only)
        outputs_of, params = _function_of_params(recipe, converted, variables, arguments, kwargs)
        return lambda params: loss_fn(outputs_of(params)), params

    loss_of, params = under(_HighPrecision())
    measure = partial(observed, _Comparer(recipes), jax.value_and_grad(loss_of))
    (loss, reference), seen = jax.jit(measure)(params)
    if not seen.places:
        raise ValueError(
            "No layer with a product takes part in the comparison. jfp8.report lists the products "
            "of the model; exempt= and only= choose layers as in jfp8.convert."
        )
    by_name = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    paths = [path for path, _ in jax.tree.leaves_with_path(by_name)]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    runs = [jax.jit(jax.value_and_grad(loss_of))(params) for loss_of, params in map(under, recipes)]
    losses, gradients = zip((loss, reference), *runs, strict=True)
    return Comparison(
        *recipes,
        tuple(_compared_products(seen)),
        tuple(map(_compared_gradient, names, *map(jax.tree.leaves, gradients))),
        *map(float, losses),
    )


def _half_mean_square(outputs: Any) -> jax.Array:
    floats = [
        y
        for y in arrays_apart(outputs, in_objects=True)[0]
        if jnp.issubdtype(y.dtype, jnp.floating)
    ]
    total = sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in floats)
    return jnp.asarray(total) / max(2 * sum(y.size for y in floats), 1)


def _linen_variables(
    model: nn.Module, variables: Mapping[str, Any] | None, arguments: Any, kwargs: dict[str, Any]
) -> Mapping[str, Any]:
    """Return the variables without FP8 state, which belongs to one recipe."""
    if variables is None:
        given = {k: v for k, v in kwargs.items() if k != "rngs"}
        rngs = {name: jax.random.key(0) for name in ("params", "dropout")}
        variables = model.init({**rngs, **kwargs.get("rngs", {})}, *arguments, **given)
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            "variables must be what model.init returned, with 'params' in it; got "
            f"{type(variables).__name__}."
        )
    return {k: v for k, v in variables.items() if k not in ("fp8", "fp8_sink")}


def _without_recipes(model: nnx.Module) -> nnx.Module:
    """Copy `model`; converted layers of the copy take any recipe, as layers without one do."""
    copy = nnx.clone(model)
    for _, node in nnx.iter_graph(copy):
        if isinstance(node, ConvertedProduct):
            node.recipe = None
    return copy


def _function_of_params(
    recipe: Recipe, model: Any, variables: Any, arguments: Any, kwargs: dict[str, Any]
) -> tuple[Callable[[Any], Any], Any]:
    """Return the outputs of `model` under `recipe` as a function of its parameters, and these."""
    if isinstance(model, nnx.Module):
        name_products([model])  # `convert` made this copy
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        call = lambda params: nnx.merge(graph, params, rest, copy=True)(*arguments, **kwargs)
    else:
        others = dict(variables)
        params = others.pop("params")
        options: dict[str, Any] = {"rngs": {"dropout": jax.random.key(1)}, **kwargs}
        options["mutable"] = list(others)
        call = lambda params: model.apply({"params": params, **others}, *arguments, **options)[0]

    def outputs_of(params: Any) -> Any:
        with overriding(recipe):
            return call(params)

    return outputs_of, params


def _compared_products(seen: Stats) -> Iterator[ComparedProduct]:
    for tapped, index, vector in by_layer(seen.places, seen.vectors):
        measure = cast(_Errors, tapped.measure)
        value = measure.named(vector)
        errors = [
            ProductError(*(_relative(value[f"{part}_{i}"], value["signal"]) for part in _PARTS))
            for i in range(2)
        ]
        yield ComparedProduct(tapped.path, index, measure.kind, *errors)


def _relative(noise: float, signal: float) -> float:
    if signal == 0:
        return 0.0 if noise == 0 else math.inf
    return math.sqrt(noise / signal)


def _compared_gradient(path: str, reference: Any, a: Any, b: Any) -> ComparedGradient:
    r, a, b = (np.asarray(x, np.float64).ravel() for x in (reference, a, b))
    error = lambda x: _relative(float(np.sum((x - r) ** 2)), float(np.sum(r**2)))
    norms = lambda x: np.linalg.norm(x) * np.linalg.norm(r)
    cosine = lambda x: float(x @ r / norms(x)) if norms(x) else math.nan
    return ComparedGradient(path, error(a), error(b), cosine(a), cosine(b))
