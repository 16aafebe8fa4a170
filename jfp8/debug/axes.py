"""Follow the batch and the positions of an input through the arrays of a program.

A dimension of an array is a product of factors: of the batch (``"sequences"``), of the positions,
or of neither. `Axes` says which factors each dimension has; `moved_axes` what a primitive makes of
them. Nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from jax import lax

from jfp8.tracing.compat import primitive_name

Role = Literal["positions", "sequences"]
Factor: TypeAlias = tuple[Role | None, int]
Axes: TypeAlias = tuple[tuple[Factor, ...], ...]
"""The factors of each dimension, outermost first; sizes of 1 are left out."""

_RESIZED = {"rev", "pad", "sort", "cumsum", "cummax", "cumprod", "cumlogsumexp", "concatenate"}
# These may take one row of several.
CUTS = {"slice", "split", "dynamic_slice", "gather", "unstack"}


def plain_axes(shape: Sequence[int]) -> Axes:
    """Return the axes of an array that has neither sequences nor positions."""
    return tuple(((None, n),) if n > 1 else () for n in shape)


def size_of(axes: Axes, role: Role) -> int:
    """Return how many sequences or positions an array tells apart."""
    return math.prod(n for dim in axes for found, n in dim if found == role)


def moved_axes(eqn: Any, ins: Sequence[Axes | None], shape: Sequence[int]) -> Axes | None:
    """Return the axes of a result of `eqn` from its operands' axes, or None if unknown."""
    if not ins or ins[0] is None:
        return None
    name, sums = primitive_name(eqn), "axes" in eqn.params
    default = _reduced if sums else _resized if name.startswith("reduce_window") else _elementwise
    axes = _RULES.get(name, default)(eqn, ins, shape)
    if axes is None or [math.prod(n for _, n in dim) for dim in axes] != list(shape):
        return None
    may_end = sums or name in CUTS or name.startswith(("dot_general", "conv_", "reduce_window"))
    return axes if may_end or roles_of(ins) <= roles_of([axes]) else None


def roles_of(all_axes: Sequence[Axes | None]) -> set[Role]:
    """Return the roles that the axes of any of these arrays have."""
    return {role for axes in all_axes for dim in axes or () for role, _ in dim if role}


def _elementwise(_: Any, ins: Sequence[Axes | None], shape: Sequence[int]) -> Axes | None:
    return joined_axes(ins, shape)


def joined_axes(ins: Sequence[Axes | None], shape: Sequence[int]) -> Axes | None:
    """Return the axes of an elementwise result; None if an operand has another shape."""
    whole = [axes for axes in ins if axes is not None and len(axes) == len(shape)]
    if any(axes is None or len(axes) not in (0, len(shape)) for axes in ins):
        return None
    dims = []
    for i, n in enumerate(shape):
        found = [axes[i] for axes in whole if math.prod(m for _, m in axes[i]) == n]
        named = [dim for dim in found if _has_role(dim)]
        if not found:
            return None
        dims.append((named or found)[0])
    return tuple(dims)


def _has_role(dim: tuple[Factor, ...]) -> bool:
    return any(role for role, _ in dim)


def _without(axes: Axes, gone: Sequence[int]) -> Axes:
    return tuple(dim for i, dim in enumerate(axes) if i not in gone)


def _reduced(eqn: Any, ins: Sequence[Any], shape: Sequence[int]) -> Axes:
    return _without(ins[0], eqn.params["axes"])


def _resized(_: Any, ins: Sequence[Any], shape: Sequence[int]) -> Axes | None:
    """Return the axes of parts of arrays, next to each other."""
    if None in ins:
        return None
    dims = zip(*(axes for axes in ins if len(axes) == len(shape)))
    found = [next(filter(_has_role, each), each[0]) for each in dims]
    return tuple(map(_of_size, found, shape))


def _of_size(dim: tuple[Factor, ...], n: int) -> tuple[Factor, ...]:
    """Return a dimension cut or padded to `n`, which keeps its role."""
    if math.prod(m for _, m in dim) == n:
        return dim
    return ((dim[0][0] if dim else None, n),) if n > 1 else ()


def _reshape(_: Any, ins: Sequence[Axes | None], shape: Sequence[int]) -> Axes | None:
    assert ins[0] is not None
    left = [factor for dim in ins[0] for factor in dim]
    dims = []
    for n in shape:
        dim: list[Factor] = []
        while n > 1:
            if not left:
                return None
            role, size = left.pop(0)
            part = math.gcd(size, n)
            if part == 1:
                return None
            if part < size:
                left.insert(0, (role, size // part))
            dim.append((role, part))
            n //= part
        dims.append(tuple(dim))
    return tuple(dims)


def _broadcast(eqn: Any, ins: Sequence[Any], shape: Sequence[int]) -> Axes:
    dims = list(plain_axes(shape))
    for i, place in enumerate(eqn.params["broadcast_dimensions"]):
        if ins[0][i]:
            dims[place] = ins[0][i]
    return tuple(dims)


def _dot(eqn: Any, ins: Sequence[Any], shape: Sequence[int]) -> Axes | None:
    if ins[1] is None:
        return None
    summed, batch = eqn.params["dimension_numbers"]
    both = [tuple(axes[i] for i in kept) for axes, kept in zip(ins, batch)]
    shared = _elementwise(eqn, both, shape[: len(batch[0])])
    free = [_without(x, (*gone, *kept)) for x, gone, kept in zip(ins, summed, batch)]
    if shared is None:
        return None
    axes = sum(free, shared)
    # Rows that a matrix mixes or picks, as for experts, may be of any sequence or position.
    for each, other in zip(ins, reversed(free)):
        ends = roles_of([each]) - roles_of([axes])
        if ends and any(dim and not _has_role(dim) for dim in other):
            return None
    return axes


def _conv(eqn: Any, ins: Sequence[Any], shape: Sequence[int]) -> Axes:
    numbers: lax.ConvDimensionNumbers = eqn.params["dimension_numbers"]
    dims = list(plain_axes(shape))
    for into, out in zip(numbers.lhs_spec, numbers.out_spec, strict=True):
        if into != numbers.lhs_spec[1]:
            dims[out] = _of_size(ins[0][into], shape[out])
    return tuple(dims)


def _gather(eqn: Any, ins: Sequence[Any], shape: Sequence[int]) -> Axes | None:
    """Give rows of a table the axes of their indices, and rows of a batch its own."""
    numbers: lax.GatherDimensionNumbers = eqn.params["dimension_numbers"]
    picked = numbers.collapsed_slice_dims
    named = [ins[0][i] for i in picked if _has_role(ins[0][i])]
    if ins[1] is None or len(named) > 1:
        return None
    kept = iter(_without(ins[0], (*picked, *numbers.operand_batching_dims)))
    batch = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims))
    indices = enumerate(ins[1][:-1])
    dims = []
    for place, n in enumerate(shape):
        if place in numbers.offset_dims:
            dims.append(_of_size(next(kept), n))
            continue
        i, dim = next(indices)
        source = [ins[0][batch[i]]] if i in batch else named
        dims.append(_of_size(source[0], n) if source and not _has_role(dim) else dim)
    return tuple(dims)


def _stack(eqn: Any, ins: Sequence[Any], shape: Sequence[int]) -> Axes | None:
    place = eqn.params["axis"]
    inner = _elementwise(eqn, ins, (*shape[:place], *shape[place + 1 :]))
    new = ((None, shape[place]),) if shape[place] > 1 else ()
    return None if inner is None else (*inner[:place], new, *inner[place:])


_RULES: dict[str, Any] = {
    **dict.fromkeys(_RESIZED | CUTS, _resized),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "gather": _gather,
    "reduce_precision": _elementwise,
    "reshape": _reshape,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": lambda eqn, ins, _: tuple(ins[0][i] for i in eqn.params["permutation"]),
    "unstack": lambda eqn, ins, _: _without(ins[0], [eqn.params["axis"]]),
}
