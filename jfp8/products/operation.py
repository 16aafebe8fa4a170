"""An operation: three matmuls, fprop, dgrad and wgrad, of operands that are quantized for them.

The core has a reference for each kind of operation. The planner for a kind of device may know
another operation that computes the same: see `Planner.plan`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import use_abstract_mesh

from jfp8.matmul.spec import Implementation, MatmulSpec, has_one_scale
from jfp8.products.observers import OBSERVER
from jfp8.products.quantized_rhs import has_scales_of, with_one_scale
from jfp8.products.seeds import rotation_seed, seed_for
from jfp8.products.shared_input import SharedInput
from jfp8.quantizers.from_forward import FromForward
from jfp8.quantizers.quantizer import Context, Quantizer, quantized
from jfp8.recipes.product import Product
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray, check_scale_shape, scaled_values
from jfp8.scaling.codes import as_float_array
from jfp8.scaling.history import AmaxState
from jfp8.scaling.scales import amax
from jfp8.tracing.device import current_device, explicit_mesh
from jfp8.tracing.devices import Device

Kind = Literal["fprop", "dgrad", "wgrad"]
Operand = ScaledArray | jax.Array


class State(NamedTuple):
    """A product's amax histories, sink and random key; for the fields see `scaled_dot_general`."""

    histories: dict[str, AmaxState] | None = None  # called ``state`` there
    sink: jax.Array | None = None
    key: jax.Array | None = None
    shared: SharedInput | None = None  # if other products have the same lhs


@dataclass(frozen=True)
class Options:
    """Options of operations of any kind.

    Attributes:
      recipe, implementation: see `scaled_dot_general`.
      rhs_dtype: to which rhs is cast before all else; None: to none. A layer with parameters in f32
        that computes in bf16 would cast its kernel itself, and the gradient of a bf16 array is
        bf16: a rounding, and a pass over memory. Where the operation casts the kernel, its f32 sums
        are the gradient.
      device: the one that the program is traced for; operations find it out, see `on_device_of`.
      if_trained: a warning for programs that differentiate with respect to rhs.
    """

    recipe: Recipe
    implementation: Implementation = None
    rhs_dtype: np.dtype | None = None
    device: Device = None
    if_trained: str | None = None

    def on_device_of(self, *operands: Any) -> Options:
        """Return these options for the device that a program with `operands` is traced for."""
        arrays = (x.data if isinstance(x, ScaledArray) else x for x in operands)
        return replace(self, device=current_device(*arrays))


@functools.cache
def sums(options: Options, kind: Kind) -> MatmulSpec:
    """Return how one of the three matmuls is summed: its spec without shapes."""
    recipe = options.recipe
    product: Product = getattr(recipe.resolved(), kind)
    accumulation: str = recipe.accumulation
    # The hardware promotes where fast sums are not allowed.
    if recipe.accumulation == "hopper" and not product.fast_accumulation:
        accumulation = "hopper_every_128"
    return MatmulSpec(
        accumulation=accumulation,
        fast_accumulation=product.fast_accumulation,
        powers_of_two=product.powers_of_two,
        # Between devices, gradients of kernels in f32 are what layers compute in: half the bytes.
        partial_dtype=options.rhs_dtype if kind == "wgrad" else None,
        implementation=options.implementation,
        device=options.device,
    )


class Observed(NamedTuple):
    """amax of the two operands of a product; NaN or Inf where the operand has one.

    f32[]; on the way to the backward pass also f32[n] of n parts of an operand. Zeros mean that
    nothing was observed: only products that are differentiated observe their operands.
    """

    lhs: jax.Array
    rhs: jax.Array


class Use(NamedTuple):
    """One of the two matmuls that a tensor takes part in."""

    kind: Kind
    product: Product  # the recipe's settings for it
    quantizer: Quantizer | None  # the tensor's; None leaves it in high precision
    contracting: tuple[int, ...]  # the dimensions of the tensor that the matmul sums over
    other: Operand | None = None  # set for a gradient: kernels write the product of both scales
    rotation_seed: jax.Array | None = None  # if the other operand was rotated before this one

    @property
    def other_scale(self) -> jax.Array | None:
        """The only scale of `other`, f32[]; None if there is none, or more."""
        q = self.other
        scale: Any = q.scale if isinstance(q, ScaledArray) and has_one_scale(q) else None
        return scale

    def unchanged(self, q: ScaledArray, quantize: Callable[..., Any]) -> ScaledArray | None:
        """Return `q` as the matmul takes its bytes; None if its values must be quantized again.

        One scale serves any direction; several have to be laid out as those of `quantize`.
        """
        quantizer = self.quantizer
        if quantizer is None or self.product.rotation is not None or quantizer.fmt != q.format:
            return None
        one = with_one_scale(q)
        if one is not None and quantizer.block is None:
            return one
        return q if has_scales_of(quantizer, q, self.contracting, quantize) else None


@dataclass(frozen=True)
class Operation:
    """A bilinear operation ``y = lhs . rhs`` on arrays of certain shapes: a pytree.

    Its operands are `ScaledArray`s, or plain arrays where a recipe leaves them in high precision:
    ``(lhs, rhs)`` for fprop, ``(grad, rhs)`` for dgrad, ``(lhs, grad)`` for wgrad. Its leaves, if
    it has any, are further arrays that it needs, neither quantized nor differentiated.

    Attributes:
      shapes: shapes of lhs and rhs.
      dtypes: dtypes of lhs, rhs and y.
      lhs_of_layers: equal for operations that may share a quantized lhs; last, its shape then.
    """

    lhs_of_layers: ClassVar[Any] = None

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[np.dtype, np.dtype, np.dtype]

    def dtype_of(self, kind: Kind) -> np.dtype:
        """Return the dtype of a matmul's result: the dtype of y, or of the gradient's primal."""
        return self.dtypes[{"fprop": 2, "dgrad": 0, "wgrad": 1}[kind]]

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the dimensions of both arranged operands that the matmul sums over."""
        raise NotImplementedError

    def terms(self, kind: Kind) -> int | None:
        """Return the number of products that each element of a result sums, for `jfp8.report`.

        None: `jfp8.report` reads it from the ``dot_general`` or ``conv_general_dilated`` itself.
        """
        del kind
        return None

    def arrange(self, role: str, x: Any) -> Any:
        """Return an operand, ``lhs``, ``rhs`` or ``grad``, in the layout in which it is quantized.

        A linear function of the operand. `multiply` undoes it for results.
        """
        del role
        return x

    def made(self, role: str, x: jax.Array, make: Callable[..., Any], *parts: jax.Array) -> Any:
        """Return what `quantize_for_both` takes for `x`, if a kernel may make that from `parts`.

        Args:
          role: ``lhs``, which is `jfp8.products.mlp.make_all` of all `parts`; or ``grad``, its
            gradient.
          x: the result of `arrange`.
          parts: ``h``, maybe in several arrays; or ``h`` and the gradient of lhs.
        """
        del role, make, parts
        return x

    def with_bias(self, bias: jax.Array, options: Options) -> Operation | None:
        """Return this operation with a bias ``[n]`` added to y; None if it cannot add one."""
        del bias, options
        return None

    def quantize(self, role: str, x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
        """Return one operand, ``lhs``, ``rhs`` or ``grad``, quantized by `quantizer`."""
        del role
        return quantized(quantizer, at.contracting, x, at.amax, at.state, at.seed)

    def quantize_for_both(
        self,
        role: str,
        x: Any,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
        dtype: np.dtype | None,
        /,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        """Return one operand as both of its matmuls take it, and its amax, if one step can do that.

        It may also give the amaxes of parts of the operand, f32[n]. Otherwise None, and it is
        quantized for one matmul after the other. Without a backward pass there is no second one.

        Args:
          x: the result of `arrange` or `made`.
          dtype: to which `x` is cast first; None: to none.
        """
        del role, x, first, second, state, dtype
        return None

    def after_transfer(self, role: str, q: Operand) -> Operand:
        """Return an operand, quantized for its first matmul, where the matmuls take it.

        If it is sent to other devices, what arrives is all that its second matmul has of it.
        """
        del role
        return q

    def relayout(self, role: str, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        """Return a quantized operand as `multiply` takes it, for a sum over `contracting`."""
        del role, contracting
        return operand

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        """Return y, or the gradient of an operand, in the layout given to `arrange`; see `sums`."""
        raise NotImplementedError

    def stored(
        self, kind: Kind, output: Quantizer, y: jax.Array, seed: jax.Array | None
    ) -> jax.Array:
        """Return the result of a matmul, rounded by `output` to the format of stored results."""
        role = {"fprop": "y", "dgrad": "d_lhs", "wgrad": "d_rhs"}[kind]
        use = Use(kind, Product(None, None), output, contracting=())
        q = QuantizedOperand(role, y, None, seed, self).for_one(use, kind)
        assert isinstance(q, ScaledArray)
        return scaled_values(q).astype(y.dtype)


ROTATION_NAME = "jfp8_rotation"


@dataclass(frozen=True)
class QuantizedOperand:
    """One tensor, ``"lhs"``, ``"rhs"`` or ``"grad"``, that takes part in two of the matmuls."""

    role: str
    x: Operand  # returned by `Operation.arrange`
    state: AmaxState | None
    seed: jax.Array | None  # the user's
    operation: Operation
    dtype: np.dtype | None = None  # to which it is cast first
    made: Any = None  # returned by `Operation.made`

    def quantized(
        self, first: Use, second: Use | None
    ) -> tuple[Operand, Operand | None, jax.Array]:
        """Return the tensor as its first product takes it, as its second one does, and its amax."""
        if not isinstance(self.x, ScaledArray) and OBSERVER.value is None:
            x = self.x if self.made is None else self.made
            uses = first, second, self.state, self.dtype
            found = self.operation.quantize_for_both(self.role, x, *uses)
            if found is not None:
                return found
        if self.dtype is not None and not isinstance(self.x, ScaledArray):
            return replace(self, x=self.x.astype(self.dtype), dtype=None).quantized(first, second)
        largest = amax(scaled_values(self.x) if isinstance(self.x, ScaledArray) else self.x)
        for_both = second is not None and _same(first, second)
        kinds = f"{first.kind}+{second.kind}" if for_both else first.kind
        made = self.for_one(first, kinds, largest)
        q = self.operation.after_transfer(self.role, made)
        again = None
        if second is not None:
            source = self if q is made else replace(self, x=q)
            again = q if for_both else source.for_one(second, second.kind, largest)
            again = self.operation.relayout(self.role, again, second.contracting)
        return self.operation.relayout(self.role, q, first.contracting), again, largest

    def for_one(self, use: Use, kinds: str, largest: jax.Array | None = None) -> Operand:
        """Return the tensor as one product takes it; in high precision if `use.quantizer` is None.

        The values of a `ScaledArray` are quantized, too, if its bytes cannot stay unchanged.
        """
        product, quantizer, contracting = use.product, use.quantizer, use.contracting
        x = self.x
        if isinstance(x, ScaledArray):
            quantize = functools.partial(self.operation.quantize, self.role)
            if (as_it_is := use.unchanged(x, quantize)) is not None:
                return as_it_is
            x = scaled_values(x)
        largest = of_tensor = amax(x) if largest is None else largest
        if product.rotation is not None:
            (axis,) = contracting
            rotated_by = use.rotation_seed
            if rotated_by is None:  # this operand comes first
                rotated_by = rotation_seed(product, use.kind, of_tensor, self.seed)
            with jax.named_scope(ROTATION_NAME):
                x = product.rotation(x, axis, rotated_by)
            largest = amax(x)
        if quantizer is None:
            return x
        seed = None
        if quantizer.stochastic:
            seed = seed_for(f"{self.role}{contracting}", of_tensor, self.seed)
        at = Context(contracting, largest, self.state, seed)
        q = self.operation.quantize(self.role, x, quantizer, at)
        watching = OBSERVER.value
        return q if watching is None else watching.quantized(self.role, kinds, quantizer, x, q)


def _same(first: Use, second: Use) -> bool:
    """Return True if both products take the same bytes."""
    if isinstance(second.quantizer, FromForward):
        return True
    rotated = first.product.rotation is not None or second.product.rotation is not None
    any_direction = first.quantizer is None or first.quantizer.one_for_both
    return first.quantizer == second.quantizer and any_direction and not rotated


# The operands that users pass.


def as_operands(
    lhs: jax.typing.ArrayLike, rhs: jax.typing.ArrayLike | ScaledArray
) -> tuple[jax.Array, Operand]:
    """Return both operands as floating arrays, or rhs as a `ScaledArray` whose scale fits."""
    if isinstance(lhs, ScaledArray):
        raise TypeError(
            "lhs is a ScaledArray, but only rhs may be one: a weight that is kept in FP8. Pass "
            "lhs.dequantize(), or multiply two ScaledArrays with jfp8.scaled_matmul."
        )
    lhs = as_float_array(lhs, "lhs", codes=False)
    if not isinstance(rhs, ScaledArray):
        return lhs, as_float_array(rhs, "rhs", codes=False)
    _ = rhs.format  # raises for data of any other dtype
    check_scale_shape(rhs)
    return lhs, rhs


def dtypes_of(
    lhs: jax.Array, rhs: Operand, options: Options, preferred: jax.typing.DTypeLike | None
) -> tuple[np.dtype, np.dtype, np.dtype]:
    """Return the dtypes of lhs and rhs, or of their gradients, and of y: `preferred` or theirs."""
    of_rhs = None if isinstance(rhs, ScaledArray) else options.rhs_dtype or rhs
    y = preferred or jnp.result_type(*(x for x in (lhs, of_rhs) if x is not None))
    if not jnp.issubdtype(y, jnp.floating):
        raise TypeError(f"preferred_element_type must be a floating dtype, got {np.dtype(y)}.")
    values: Any = rhs.carrier if isinstance(rhs, ScaledArray) else rhs
    d_rhs = np.dtype(getattr(values, "dtype", np.float32))
    rounded = options.recipe.wgrad_dtype if d_rhs.itemsize > 2 else None
    return np.dtype(lhs.dtype), np.dtype(rounded or d_rhs), np.dtype(y)


def in_mesh_of_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function` with the `explicit_mesh` of its arguments, if there is one, in effect."""

    @functools.wraps(function)
    def call(*args: Any, **how: Any) -> Any:
        mesh = explicit_mesh(args, how)
        with contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh):
            return function(*args, **how)

    return call
