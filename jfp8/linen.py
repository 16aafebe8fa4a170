"""Flax Linen modules: Flax's own layers with an FP8 product inside.

State lives in two collections beside ``params``, both made by ``model.init``:

  * ``fp8/<path>/{lhs,rhs,grad}``: amax histories (see `jfp8.scaling.AmaxState`);
  * ``fp8_sink/<path>/amax``: zeros to differentiate by, whose cotangent tells the amaxes.

Which of them `apply` is given decides what is delayed: without ``fp8`` everything uses current
scaling; with it, activations and weights use their histories; with ``fp8_sink`` too, gradients do.
A mutable ``fp8`` without a sink is kept up by `apply` itself, like ``batch_stats``. With a sink,
`jfp8.advance` keeps it up, once per optimizer step.

Recipes that round stochastically draw from the random stream ``fp8``, if `apply` is given one
(``rngs={"fp8": key}``), and otherwise from the data; see `jfp8.scaled_dot_general`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jfp8.bilinear import Observed
from jfp8.conv import observed_conv_general_dilated
from jfp8.dot_general import observed_dot_general
from jfp8.matmul import Implementation
from jfp8.recipes import DelayedScaling, Recipe, check_recipe
from jfp8.scaling import AmaxState, observe, push_amax
from jfp8.sink import ROLES, init_sink


class DotGeneral(nn.Module):
    """An FP8 ``dot_general`` with its state, for ``nn.Dense(dot_general_cls=DotGeneral)``.

    Use ``functools.partial(DotGeneral, recipe=...)`` for another recipe than the default.

    Attributes:
      recipe: which quantizer each operand gets.
      implementation: see `jfp8.scaled_matmul`.
    """

    recipe: Recipe = DelayedScaling()
    implementation: Implementation = None

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """``jax.lax.dot_general`` in FP8; see `jfp8.scaled_dot_general`.

        Args:
          lhs, rhs: ``f32 | bf16 | f16`` arrays.
          dimension_numbers: as for ``jax.lax.dot_general``.
          precision: accepted because Flax passes it; it chooses between high-precision products,
            of which there is none here.
          preferred_element_type: dtype of the result.
        """
        del precision
        return _with_state(
            self,
            partial(
                observed_dot_general,
                lhs,
                rhs,
                dimension_numbers,
                preferred_element_type=preferred_element_type,
                implementation=self.implementation,
            ),
        )


class ConvGeneralDilated(nn.Module):
    """FP8 ``conv_general_dilated`` with its state, for ``nn.Conv(conv_general_dilated_cls=...)``.

    Use ``functools.partial(ConvGeneralDilated, recipe=...)`` for another recipe than the default.

    Attributes:
      recipe: which quantizer each operand gets.
      implementation: see `jfp8.scaled_matmul`.
    """

    recipe: Recipe = DelayedScaling()
    implementation: Implementation = None

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """``jax.lax.conv_general_dilated`` in FP8; see `jfp8.scaled_conv_general_dilated`.

        Args:
          lhs, rhs: ``f32 | bf16 | f16`` arrays: images and kernels.
          window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
            feature_group_count: as for ``jax.lax.conv_general_dilated``.
          precision: accepted because Flax passes it; see `DotGeneral`.
          preferred_element_type: dtype of the result.
        """
        del precision
        return _with_state(
            self,
            partial(
                observed_conv_general_dilated,
                lhs,
                rhs,
                window_strides,
                padding,
                lhs_dilation,
                rhs_dilation,
                dimension_numbers,
                feature_group_count,
                preferred_element_type=preferred_element_type,
                implementation=self.implementation,
            ),
        )


def _with_state(
    module: DotGeneral | ConvGeneralDilated, product: Callable[..., tuple[jax.Array, Observed]]
) -> jax.Array:
    """`product` under the recipe, the state, the sink and the random key of `module`."""
    recipe = check_recipe(module.recipe).for_layer("/".join(module.path[:-1]))
    key = None
    if recipe.products().stochastic and module.has_rng("fp8"):
        key = module.make_rng("fp8")
    state, sink = _read_state(module, recipe), _read_sink(module, recipe)
    y, observed = product(recipe=recipe, state=state, sink=sink, key=key)
    if state is not None and module.is_mutable_collection("fp8") and not module.is_initializing():
        _record(module, state, observed, pushing=sink is None)
    return y


def _read_state(module: nn.Module, recipe: Recipe) -> dict[str, AmaxState] | None:
    """The histories, made if they are missing and may be; None without them."""
    if module.has_variable("fp8", ROLES[0]):
        return {role: module.get_variable("fp8", role) for role in ROLES}
    empty = recipe.init_state()
    if empty is None or not module.is_mutable_collection("fp8"):
        return None
    return {role: module.variable("fp8", role, lambda s: s, s).value for role, s in empty.items()}


def _read_sink(module: nn.Module, recipe: Recipe) -> jax.Array | None:
    """The sink, if somebody may differentiate by it: nobody does by a mutable collection."""
    if module.is_mutable_collection("fp8_sink"):
        if module.is_initializing() and recipe.init_state() is not None:
            module.variable("fp8_sink", "amax", init_sink)
        return None
    if not module.has_variable("fp8_sink", "amax"):
        return None
    return module.get_variable("fp8_sink", "amax")


def _record(
    module: nn.Module, state: dict[str, AmaxState], observed: Observed, *, pushing: bool
) -> None:
    """Write the amaxes of lhs and rhs into the mutable ``fp8`` collection.

    Without a sink this call is the step (`pushing`); with one, `advance` will close the step, and
    reads the running maximum.
    """
    for role, amax in zip(Observed._fields, observed, strict=True):
        if pushing:
            history = push_amax(state[role]["amax_history"], amax)
            updated = {**state[role], "amax_history": history}
        else:
            updated = observe(state[role], amax)
        module.put_variable("fp8", role, updated)


@dataclass(frozen=True)
class _DotGeneralOf:
    """Makes the `DotGeneral` of a layer. Unlike a partial it compares by value, for ``nn.jit``."""

    recipe: Recipe
    implementation: Implementation

    def __call__(self) -> DotGeneral:
        return DotGeneral(recipe=self.recipe, implementation=self.implementation)


@dataclass(frozen=True)
class _ConvGeneralDilatedOf:
    """Makes the `ConvGeneralDilated` of a layer; see `_DotGeneralOf`."""

    recipe: Recipe
    implementation: Implementation

    def __call__(self) -> ConvGeneralDilated:
        return ConvGeneralDilated(recipe=self.recipe, implementation=self.implementation)


def _own_dot_general(layer: Dense | DenseGeneral) -> _DotGeneralOf:
    """What `layer` computes its product with, or an error if it was told to use something else."""
    given = layer.dot_general_cls
    # A clone arrives with the one of its original, which may have had another recipe.
    if layer.dot_general is not None or not (given is None or isinstance(given, _DotGeneralOf)):
        name = type(layer).__name__
        raise ValueError(
            f"jfp8.{name} computes its product itself, so it takes neither dot_general nor "
            f"dot_general_cls. Pass recipe=..., or use flax.linen.{name} with dot_general_cls."
        )
    return _DotGeneralOf(check_recipe(layer.recipe), layer.implementation)


class Dense(nn.Dense):
    """``flax.linen.Dense`` with its product, forward and backward, in FP8.

    Takes every argument of ``nn.Dense`` but ``dot_general`` and ``dot_general_cls``; the ``params``
    are those of ``nn.Dense``, with the same initial values for the same key.

    Attributes:
      recipe: which quantizer each operand gets.
      implementation: see `jfp8.scaled_matmul`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> variables = jfp8.Dense(4).init(jax.random.key(0), jnp.ones((1, 3)))
    >>> sorted(variables)
    ['fp8', 'fp8_sink', 'params']
    """

    recipe: Recipe = DelayedScaling()
    implementation: Implementation = None

    def __post_init__(self) -> None:
        self.dot_general_cls = _own_dot_general(self)
        super().__post_init__()


class DenseGeneral(nn.DenseGeneral):
    """``flax.linen.DenseGeneral`` with its product, forward and backward, in FP8.

    Takes every argument of ``nn.DenseGeneral`` but ``dot_general`` and ``dot_general_cls``; the
    ``params`` are those of ``nn.DenseGeneral``, with the same initial values for the same key.

    Attributes:
      recipe: which quantizer each operand gets.
      implementation: see `jfp8.scaled_matmul`.
    """

    recipe: Recipe = DelayedScaling()
    implementation: Implementation = None

    def __post_init__(self) -> None:
        self.dot_general_cls = _own_dot_general(self)
        super().__post_init__()


class Conv(nn.Conv):
    """``flax.linen.Conv`` with its convolution, forward and backward, in FP8.

    Takes every argument of ``nn.Conv`` but ``conv_general_dilated`` and
    ``conv_general_dilated_cls``; the ``params`` are those of ``nn.Conv``, with the same initial
    values for the same key.

    Attributes:
      recipe: which quantizer each operand gets.
      implementation: see `jfp8.scaled_matmul`.
    """

    recipe: Recipe = DelayedScaling()
    implementation: Implementation = None

    def __post_init__(self) -> None:
        given = self.conv_general_dilated_cls
        # A clone arrives with the one of its original, which may have had another recipe.
        own = given is None or isinstance(given, _ConvGeneralDilatedOf)
        if self.conv_general_dilated is not None or not own:
            raise ValueError(
                "jfp8.Conv computes its convolution itself, so it takes neither "
                "conv_general_dilated nor conv_general_dilated_cls. Pass recipe=..., or use "
                "flax.linen.Conv with conv_general_dilated_cls."
            )
        recipe = check_recipe(self.recipe)
        self.conv_general_dilated_cls = _ConvGeneralDilatedOf(recipe, self.implementation)
        super().__post_init__()


class Einsum(nn.Einsum):
    """``flax.linen.Einsum`` with its product, forward and backward, in FP8.

    Takes every argument of ``nn.Einsum``; the ``params`` are those of ``nn.Einsum``, with the same
    initial values for the same key.

    Attributes:
      recipe: which quantizer each operand gets.
      implementation: see `jfp8.scaled_matmul`.
    """

    recipe: Recipe = DelayedScaling()
    implementation: Implementation = None

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: the left operand.
          einsum_str: the equation, if the constructor was given none: two operands and "->".
        """
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        terms = _parse_einsum(equation, inputs.ndim, len(self.shape))
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, sizes = None, dict(zip(terms.rhs, self.shape, strict=True))
        if self.use_bias:
            bias_shape = tuple(sizes[c] for c in terms.out if c in sizes)
            bias = self.param("bias", self.bias_init, bias_shape, self.param_dtype)
        lhs, rhs, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert lhs is not None  # promotion keeps what is given
        assert rhs is not None
        dot_general = DotGeneral(recipe=self.recipe, implementation=self.implementation)
        y = _einsum(terms, lhs, rhs, dot_general, self.preferred_element_type)
        if bias is not None:
            y += bias.reshape([sizes.get(c, 1) for c in terms.out])
        return y


@dataclass(frozen=True)
class _Terms:
    """An einsum equation of two operands, ellipses spelled out: one letter per dimension."""

    lhs: str
    rhs: str
    out: str


def _parse_einsum(equation: str, lhs_ndim: int, rhs_ndim: int) -> _Terms:
    operands, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        raise ValueError(
            f"einsum_str must have two operands and '->', like 'abc,cd->abd'; got {equation!r}."
        )
    lhs, rhs = operands.split(",")
    unused = [c for c in string.ascii_letters if c not in equation]
    hidden = {
        term: ndim - len(term.replace("...", ""))
        for term, ndim in ((lhs, lhs_ndim), (rhs, rhs_ndim))
    }
    for (term, n), ndim in zip(hidden.items(), (lhs_ndim, rhs_ndim), strict=False):
        if n < 0 or (n > 0 and "..." not in term):
            raise ValueError(f"{equation!r}: {term!r} does not name {ndim} dimensions.")
    widest = max(hidden.values())

    def spelled(term: str, n: int) -> str:
        return term.replace("...", "".join(unused[widest - n : widest]))

    terms = _Terms(spelled(lhs, hidden[lhs]), spelled(rhs, hidden[rhs]), spelled(out, widest))
    if any(len(set(term)) != len(term) for term in (terms.lhs, terms.rhs, terms.out)):
        raise ValueError(f"{equation!r} repeats a letter within a term, which is not a product.")
    missing = set(terms.out) - set(terms.lhs + terms.rhs)
    if missing:
        raise ValueError(f"{equation!r}: {sorted(missing)} of the result are in no operand.")
    return terms


def _einsum(
    terms: _Terms,
    lhs: jax.Array,
    rhs: jax.Array,
    dot_general: DotGeneral,
    preferred_element_type: jax.typing.DTypeLike | None,
) -> jax.Array:
    """The einsum as one ``dot_general``, with sums before it and a transposition after it."""
    lhs_sizes = dict(zip(terms.lhs, lhs.shape, strict=True))
    rhs_sizes = dict(zip(terms.rhs, rhs.shape, strict=True))
    lhs, lhs_term = _drop_stretched(lhs, terms.lhs, rhs_sizes)
    rhs, rhs_term = _drop_stretched(rhs, terms.rhs, lhs_sizes)
    lhs, lhs_term = _sum_lonely(lhs, lhs_term, rhs_term + terms.out)
    rhs, rhs_term = _sum_lonely(rhs, rhs_term, lhs_term + terms.out)
    shared = [c for c in lhs_term if c in rhs_term]
    batch = [c for c in shared if c in terms.out]
    contract = [c for c in shared if c not in terms.out]

    def dims(letters: Sequence[str], term: str) -> tuple[int, ...]:
        return tuple(term.index(c) for c in letters)

    numbers = (
        (dims(contract, lhs_term), dims(contract, rhs_term)),
        (dims(batch, lhs_term), dims(batch, rhs_term)),
    )
    y = dot_general(lhs, rhs, numbers, preferred_element_type=preferred_element_type)
    produced = batch + [c for c in lhs_term + rhs_term if c not in shared]
    return y.transpose([produced.index(c) for c in terms.out])


def _drop_stretched(x: jax.Array, term: str, other_sizes: dict[str, int]) -> tuple[jax.Array, str]:
    """`x` without the dimensions of size 1 that the other operand stretches, and its term."""
    dropped = [i for i, c in enumerate(term) if x.shape[i] == 1 and other_sizes.get(c, 1) != 1]
    kept = "".join(c for i, c in enumerate(term) if i not in dropped)
    return x.squeeze(dropped), kept


def _sum_lonely(x: jax.Array, term: str, elsewhere: str) -> tuple[jax.Array, str]:
    """`x` summed over the dimensions that appear nowhere else, and what is left of its term."""
    lonely = tuple(i for i, c in enumerate(term) if c not in elsewhere)
    kept = "".join(c for c in term if c in elsewhere)
    return (jnp.sum(x, axis=lonely) if lonely else x), kept
