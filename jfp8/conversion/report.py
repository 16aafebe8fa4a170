"""List every product of a model, forward and backward, and which of them are FP8: `report`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from jfp8.checkpoint_policies import OF_DOTS
from jfp8.conversion.attention_rows import attention_rows, is_attention
from jfp8.conversion.causal import masks_later_positions
from jfp8.conversion.flops import CUDNN_PASSES, CUDNN_RATE, flops, microseconds, parts_of_step
from jfp8.conversion.function import weights_apart
from jfp8.conversion.linen_attention import own_attention
from jfp8.conversion.nnx_copy import with_notes
from jfp8.conversion.product_report import Report
from jfp8.conversion.product_rows import (
    INSIDE_OF_ATTENTION,
    INSIDE_OF_OURS,
    NO_LAYER,
    OWN_ATTENTION,
    ProductRow,
)
from jfp8.conversion.program import arrays_apart
from jfp8.conversion.weight_matmul import PRODUCTS
from jfp8.layers.linen.attention import MultiHeadDotProductAttention
from jfp8.layers.linen.products import ProductModule
from jfp8.layers.linen.transformer import LayerNormAttention
from jfp8.matmul.planner import Scales
from jfp8.products.operation import ROTATION_NAME
from jfp8.products.vjp import PRODUCT_NAME
from jfp8.recipes.in_effect import why_disabled
from jfp8.scaling import formats
from jfp8.tracing.compat import jaxprs_of, policy_of, without_dead_code
from jfp8.tracing.device import current_gpu, current_tpu
from jfp8.tracing.interpreter import equations
from jfp8.tracing.notes import Kind, explaining, layer_noted, notes_of

F8_NAMES = {np.dtype(fmt.dtype): fmt.name.lower() for fmt in formats.FORMATS}
_DATA = {np.dtype(fmt.dtype) for fmt in formats.FORMATS if fmt.signed}
_NARROW = frozenset(F8_NAMES.values())
_PLAIN = {*PRODUCTS, *CUDNN_PASSES}


def report(model: Any, *inputs: Any, **kwargs: Any) -> Report:
    """List every product in the forward and the backward pass of `model`.

    Nothing is computed: only the model and its gradient with respect to the parameters are traced.
    A product counts as FP8 if both of its operands are in a narrow format when multiplied.

    Args:
      model: a Linen module, converted, with layers of jfp8, or neither; an NNX module; a function.
      *inputs: for Linen ``variables, *inputs``: all that ``model.init`` returned (or shapes, as
        ``jax.eval_shape`` gives them), and the arguments of ``model.apply``. For NNX and functions
        their arguments.
      **kwargs: further arguments of the model, such as ``train=True``; and for Linen ``rngs=`` and
        ``method=`` of ``model.apply``. By default every stream of random numbers gets a key.

    Returns:
      A `Report`: ``print`` it for the layers, ``print(report.verbose())`` for every product; or
      read ``.rows``, ``.fp8_fraction``, ``.to_dict()``.

    Raises:
      TypeError: `model` is not a model; a Linen model without variables; a model without inputs.

    Warns:
      UserWarning: positions of a causal model share scales (see `Recipe.is_causal`). A model counts
        as causal if it has a mask: a comparison of positions, or a triangular array. Or, traced for
        a GPU with known rates: FP8 is expected to slow down some layers. Or a policy of
        ``jax.checkpoint`` does not see the FP8 matmuls of jfp8's layers.

    >>> import flax.linen as nn, jax, jax.numpy as jnp, jfp8
    >>> model = jfp8.convert(nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)]))
    >>> x = jnp.ones((8, 32))
    >>> r = jfp8.report(model, model.init(jax.random.key(0), x), x)
    >>> round(r.fp8_fraction, 3)
    0.681
    >>> [(row.path, row.kind) for row in r.rows if row.fp8]
    [('layers_0', 'fprop'), ('layers_0', 'wgrad')]
    """
    closed = _jaxpr_of(model, inputs, kwargs)
    found = report_of(closed, (inputs, kwargs))
    parameters = sum(gradient.aval.size for gradient in closed.jaxpr.outvars[1:])
    found = dataclasses.replace(found, step=parts_of_step(found.rows, parameters))
    for warning in found.warnings():
        warnings.warn(warning, UserWarning, stacklevel=2)
    return found


def _jaxpr_of(model: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> ClosedJaxpr:
    """Trace a model and its gradient; say what to type if an argument is missing."""
    if isinstance(model, nn.Module):
        _check_variables(inputs)
        trace, call, given = _linen_jaxpr, "report(model, variables, x)", len(inputs) > 1 or kwargs
    elif isinstance(model, nnx.Module):
        if inputs and isinstance(inputs[0], nnx.State):
            raise TypeError("An NNX model holds its state: jfp8.report(model, x).")
        trace, call, given = _nnx_jaxpr, "report(model, x)", inputs or kwargs
    elif callable(model) and not isinstance(model, type):
        trace, call, given = _function_jaxpr, "report(function, params, batch)", inputs
    else:
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"model must be a Flax Linen or NNX module, got {given}. For Linen: "
            "jfp8.report(MyModel(...), variables, x)."
        )
    try:
        return trace(model, inputs, kwargs)
    except TypeError as error:
        if given:
            raise
        raise TypeError(
            "report was given no inputs of the model. Pass what the model is called with, or "
            f"arrays of the same shapes: jfp8.{call}. The model said: {error}"
        ) from error


def _check_variables(inputs: tuple[Any, ...]) -> None:
    if not inputs or not isinstance(inputs[0], Mapping) or "params" not in inputs[0]:
        given = type(inputs[0]).__name__ if inputs else "nothing"
        if inputs and isinstance(inputs[0], Mapping):
            given = f"{given} of {sorted(map(str, inputs[0]))}"
        raise TypeError(
            "report(model, variables, *inputs): variables must be what model.init returned, "
            f"with 'params' in it; got {given}."
        )


def report_of(closed: ClosedJaxpr, inputs: Any = ()) -> Report:
    """List the products of a program that was traced in the context `notes.explaining`."""
    causal = masks_later_positions(closed, inputs)
    kind = getattr(current_gpu(), "kind", "")
    return Report(tuple(_merged(_rows(closed.jaxpr))), causal, kind, blind=_blind(closed.jaxpr))


def _blind(jaxpr: Jaxpr) -> tuple[str, ...]:
    """Return the names of policies of ``checkpoint`` around FP8 matmuls that do not see these."""
    is_ours = lambda eqn: str(eqn.params.get("name", "")).startswith(PRODUCT_NAME)
    around = [eqn for eqn, _, _ in equations(jaxpr) if policy_of(eqn) in OF_DOTS]
    return tuple({OF_DOTS[policy_of(x)]: None for x in around if any(map(is_ours, _equations(x)))})


def _linen_jaxpr(model: nn.Module, given: Any, kwargs: dict[str, Any]) -> ClosedJaxpr:
    variables, *inputs = given

    def locate(next_fun, args, kwargs, context):
        module = context.module
        if module.scope is None or isinstance(module, ProductModule):  # without: it is being made
            return next_fun(*args, **kwargs)
        reason = _inside_of_attention(module)
        with layer_noted("/".join(module.path), type(module).__name__, reason):
            return next_fun(*args, **kwargs)

    streams = {"params", "dropout", "fp8", *kwargs.pop("rngs", {})}
    others = {k: v for k, v in variables.items() if k != "params"}
    mutable = [k for k in others if k not in ("fp8", "fp8_sink")]

    def forward(params, others, inputs, kwargs):
        key = jax.random.key(0)  # here, since nothing can be computed on a described device
        rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(sorted(streams))}
        with nn.intercept_methods(locate):
            given = {"params": params, **others}
            return model.apply(given, *inputs, rngs=rngs, mutable=mutable, **kwargs)[0]

    return _traced(forward, variables["params"], others, inputs, kwargs)


def _inside_of_attention(module: nn.Module) -> str:
    """Say why attention between the projections of `module` is not FP8; "" if it has none."""
    if isinstance(module, (MultiHeadDotProductAttention, LayerNormAttention)):
        return INSIDE_OF_OURS
    if not isinstance(module, nn.MultiHeadDotProductAttention):
        return ""
    return own_attention(module) or INSIDE_OF_ATTENTION


def _nnx_jaxpr(model: nnx.Module, inputs: Any, kwargs: dict[str, Any]) -> ClosedJaxpr:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params, rest, inputs, kwargs):
        copy = with_notes(nnx.merge(graph, params, rest, copy=True))
        return copy(*inputs, **kwargs)

    return _traced(forward, params, rest, inputs, kwargs)


def _function_jaxpr(function: Any, inputs: Any, kwargs: dict[str, Any]) -> ClosedJaxpr:
    places = getattr(function, "weights", (0,))
    return _traced(*weights_apart(function, places, inputs, kwargs))


def _traced(forward: Any, weights: Any, *others: Any) -> ClosedJaxpr:
    """Trace the gradient of a model's results by its weights, or `forward` if it has none."""
    params, whole_params = arrays_apart(weights)
    inputs, whole_inputs = arrays_apart(others)

    def flat(params, inputs):
        return total_of(forward(whole_params(params), *whole_inputs(inputs)))

    narrow = any(np.dtype(x.dtype).itemsize == 1 for x in params)  # weights kept in FP8
    function = flat if narrow or not params else jax.value_and_grad(flat)
    with explaining():
        # The gradient by the model's input, say, is traced with the rest, and never computed.
        return without_dead_code(jax.make_jaxpr(function)(params, inputs))


def total_of(y: Any) -> jax.Array:
    """Add up all numbers that a model returned."""
    floats = [
        x for x in arrays_apart(y, in_objects=True)[0] if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return sum((jnp.sum(x.astype(jnp.float32)) for x in floats), jnp.zeros(()))


def _rows(jaxpr: Jaxpr) -> Iterator[ProductRow]:
    name_of = lambda eqn: str(eqn.params.get("name", ""))
    is_ours = lambda eqn: name_of(eqn).startswith(PRODUCT_NAME)
    rotates = lambda stack: ROTATION_NAME in stack  # a part of quantizing
    enters = lambda eqn, stack: not is_ours(eqn) and not rotates(stack)
    for eqn, stack, times in equations(jaxpr, enters=enters):
        if is_attention(eqn) and _is_whole(eqn):
            yield from attention_rows(eqn, notes_of(stack), times)
        elif is_ours(eqn) and _is_whole(eqn):
            yield _fp8_row(eqn, name_of(eqn).removeprefix(PRODUCT_NAME), stack, times)
        elif eqn.primitive.name in _PLAIN and not rotates(stack):
            yield _plain_row(eqn, stack, times)


def _is_whole(eqn: Any) -> bool:
    """Tell a product from its remains where JAX need not repeat all of it (remat, loops)."""
    if any(inner.primitive.name in PRODUCTS for inner in _equations(eqn)):
        return True
    data = [v for v in eqn.invars if v.aval.dtype in F8_NAMES and v.aval.ndim]
    return len(data) >= 2  # sums that are emulated bit by bit are no products of JAX


def _fp8_row(eqn: Any, name: str, stack: str, times: int) -> ProductRow:
    kind, _, terms = name.partition("_")
    notes = notes_of(stack)
    first, second, scales = _operands(eqn)
    out = next(v.aval for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating))
    # A loop may decode a weight before it begins: its dtype here is no longer that of the operand.
    names = _noted(eqn, "formats", "").split() or [dtype_name(x) for x in (first, second)]
    narrow = _NARROW.issuperset(names)
    work = 2 * out.size * int(terms) if terms else sum(map(flops, _equations(eqn)))
    cuda, gpu = _noted(eqn, "cuda"), jax.default_backend() == "gpu"
    tpu = "" if current_tpu() is None else _noted(eqn, "tpu")
    elements = first.size + second.size + out.size
    how = "rounded" if cuda.partition(":")[0] in ("bf16", "emulate") else "fp8"
    return ProductRow(
        path=notes.get("path", ""),
        layer=notes.get("layer", ""),
        kind=kind,
        lhs=_spelled(first, names[0]),
        rhs=_spelled(second, names[1]),
        out=_spelled(out),
        fp8=narrow,
        recipe=notes.get("recipe", ""),
        implementation=cuda if gpu else tpu or "emulate",
        cuda=cuda,
        tpu=tpu,
        looks_ahead=kind == "fprop" and "ahead" in notes,
        reason="" if narrow else "the recipe keeps an operand in high precision",
        times=times,
        flops=times * work,
        **microseconds(work, elements, how if narrow else "bf16", scales),
    )


def _noted(eqn: Any, kind: Kind, default: str = "emulate") -> str:
    """Return a note of the equations inside `eqn`, such as the device's backend."""
    stacks = (str(e.source_info.name_stack) for e in _equations(eqn, branches=True))
    return next((n[kind] for n in map(notes_of, stacks) if kind in n), default)


def _operands(eqn: Any) -> tuple[Any, Any, Scales]:
    """Find both operands of a product, and the kind of their scales."""
    # They come flattened: data, its scales, data, its scales. After them there may be constants as
    # large as data, which remat in a loop takes out of the product; none is narrow.
    first, *rest = (v.aval for v in without_copy(eqn, eqn.invars))
    data = [a for a in rest if a.dtype in _DATA and a.ndim]
    second = max(data or rest, key=lambda a: a.size)
    place = next(i for i, aval in enumerate(rest) if aval is second)
    return first, second, _kind_of([*rest[:place], *rest[place + 1 : place + 2]])


def without_copy(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Return `values` of a product's inputs, without a transposed copy of the first operand.

    Such a copy, as large as the operand, comes directly before the second operand.
    """
    avals = [v.aval for v in eqn.invars]
    data = [i for i, a in enumerate(avals) if a.dtype in _DATA and a.ndim]
    has_copy = len(data) > 2 and data[2] == data[1] + 1
    if has_copy and avals[data[0]].size == avals[data[1]].size:
        return [*values[: data[1]], *values[data[2] :]]
    return list(values)


def _kind_of(scales: list[Any]) -> Scales:
    """Tell by shapes: one stretch of two or more dimensions is in blocks, of one in rows."""
    in_blocks = [scale for scale in scales if sum(n > 1 for n in scale.shape) > 1]
    if not in_blocks:
        return "rows" if any(scale.size > 1 for scale in scales) else "one"
    if any(scale.dtype == formats.E4M3FN.dtype for scale in in_blocks):
        return "nvfp4"
    return "mx" if any(scale.dtype in F8_NAMES for scale in in_blocks) else "blocks"


def _plain_row(eqn: Any, stack: str, times: int) -> ProductRow:
    notes, work, by_cudnn = notes_of(stack), flops(eqn), eqn.primitive.name in CUDNN_PASSES
    lhs, rhs, out = (v.aval for v in (*eqn.invars[:2], eqn.outvars[0]))
    return ProductRow(
        notes.get("path", ""),
        notes.get("layer", ""),
        "backward" if "transpose(" in stack else "forward",
        *(_spelled(lhs), _spelled(rhs), _spelled(out)),
        implementation="cudnn" if by_cudnn else "jax",
        reason=notes.get("reason") or why_disabled() or _why_not(eqn),
        times=times,
        flops=times * work,
        **microseconds(work / (CUDNN_RATE if by_cudnn else 1), lhs.size + rhs.size + out.size),
    )


def _why_not(eqn: Any) -> str:
    """Say why a product is not FP8, if no layer gave a reason."""
    # The innermost call outside JAX, Flax and this library.
    why, where, own = NO_LAYER, "", str(Path(__file__).parents[1])
    for frame in getattr(getattr(eqn.source_info, "traceback", None), "frames", ()):
        inside = any(f"/{name}/" in frame.file_name for name in ("jax", "flax", "jaxlib"))
        if inside and frame.function_name.startswith("dot_product_attention"):
            why = OWN_ATTENTION
        if not inside and not frame.file_name.startswith((own, "<")):
            where = f": {Path(frame.file_name).name}:{frame.line_num}"
            break
    return f"{why}{where}"


def _merged(rows: Iterator[ProductRow]) -> Iterator[ProductRow]:
    found: dict[ProductRow, int] = {}
    for row in rows:
        once = dataclasses.replace(row, times=0, flops=row.flops // row.times)
        found[once] = found.get(once, 0) + row.times
    for once, times in found.items():
        yield dataclasses.replace(once, times=times, flops=once.flops * times)


def _equations(eqn: Any, *, branches: bool = False) -> Iterator[Any]:
    """List the equations inside `eqn`; without `branches` only for the first platform."""
    for body in jaxprs_of(eqn):
        yield from (inner for inner, _, _ in equations(body, branches=branches))


def _spelled(aval: Any, name: str = "") -> str:
    return f"{name or dtype_name(aval)}[{','.join(map(str, aval.shape))}]"


def dtype_name(aval: Any) -> str:
    """Return ``"e4m3fn"``, ``"f32"`` or the like."""
    dtype = np.dtype(aval.dtype)
    return F8_NAMES.get(dtype) or dtype.name.replace("float", "f")
