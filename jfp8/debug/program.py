"""Find the tensors that a program quantizes, how often, and the sources of their scales."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.conversion.product_report import Report
from jfp8.conversion.program import arrays_apart
from jfp8.conversion.report import F8_NAMES, dtype_name, report_of, total_of, without_copy
from jfp8.debug.axes import (
    CUTS,
    Axes,
    Factor,
    Role,
    joined_axes,
    moved_axes,
    plain_axes,
    roles_of,
    size_of,
)
from jfp8.products.vjp import PRODUCT_NAME
from jfp8.tracing import interpreter
from jfp8.tracing.compat import primitive_name, scan_sizes
from jfp8.tracing.interpreter import Computed, Place, Reader, Value, notes_in, without_arrays
from jfp8.tracing.notes import explaining, notes_of, product_path

_SAME = {
    "copy",
    "first_order_only",
    "name",
    "optimization_barrier",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
}
_OF_BYTES = {"bitcast_convert_type", "convert_element_type", "mul", "select_n", "slice", "pad"}
_ROLES: tuple[Role, ...] = ("positions", "sequences")


@dataclass(frozen=True)
class Quantized:
    """Hold a tensor that becomes an operand of FP8 matmuls.

    Attributes:
      paths: places of the layers that multiply by it.
      casts: its dtypes, from the value that was computed to FP8: ``("f32", "bf16", "e4m3fn")``.
      times: how often it is quantized to this format in the trace, once if its layers share the
        result. XLA may merge equal ones.
      was_fp8: whether it had been rounded to FP8 before.
    """

    paths: tuple[str, ...]
    casts: tuple[str, ...]
    times: int
    was_fp8: bool


@dataclass(frozen=True)
class ProgramCheck:
    """Hold the result of `check_program`; prints as text.

    Attributes:
      report: every matmul, in FP8 or why not.
      tensors: all tensors that are quantized.
      later: layers in which a later position reaches an earlier result through a scale.
      others: layers in which another sequence of the batch does.
      unknown: layers for which the program does not tell.
    """

    report: Report
    tensors: tuple[Quantized, ...]
    later: tuple[str, ...]
    others: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def is_causal(self) -> bool:
        """Return True if no scale carries a later position into an earlier result."""
        return not self.later and not self.unknown

    @property
    def is_batch_invariant(self) -> bool:
        """Return True if no scale carries one sequence into the result of another."""
        return not self.others and not self.unknown

    @property
    def quantized_twice(self) -> tuple[Quantized, ...]:
        """Return the tensors that are quantized more than once, or that were in FP8 before."""
        return tuple(each for each in self.tensors if each.times > 1 or each.was_fp8)

    def __str__(self) -> str:
        joined = lambda paths: ", ".join(paths) or "none"
        lines = [
            str(self.report),
            f"Later positions reach results through a scale in: {joined(self.later)}.",
            f"Other sequences do in: {joined(self.others)}.",
        ]
        if self.unknown:
            lines.append(f"The program does not tell for: {joined(self.unknown)}.")
        for each in self.quantized_twice:
            how = f"quantized {each.times} times" if each.times > 1 else "rounded to FP8 twice"
            lines.append(f"{joined(each.paths)}: {' -> '.join(each.casts)}, {how}.")
        return "\n".join(lines)


def check_program(
    f: Callable[..., Any], *args: Any, inputs: int = -1, sequence_axis: int | None = 1
) -> ProgramCheck:
    """Check a function from its traced program: nothing is computed.

    It says which matmuls are FP8, and of each tensor that is quantized how it was cast, whether it
    is quantized more than once, and whether its scale in the forward pass depends on later
    positions, or on other sequences of the batch. A scale does if it is made from the data, such as
    an amax, and holds for several positions; one from a history does not. Attention in FP8 is left
    out: its scales never do.

    Args:
      f: a function, such as a loss, ``lambda x: model.apply(variables, x)``, or what `jfp8.convert`
        made of one.
      *args: arrays or shapes, in pytrees.
      inputs: the position of the argument whose arrays are ``[batch, ..., positions, ...]``.
      sequence_axis: the axis of positions in these, or None if there are none.

    Returns:
      A `ProgramCheck`.

    Raises:
      ValueError: no array of the inputs has that axis.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> w, x = jnp.ones((16, 8)), jnp.ones((2, 4, 16))
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> check = jfp8.debug.check_program(jfp8.convert(loss, "current", exempt=()), w, x)
    >>> check.later, check.is_batch_invariant
    (('w',), False)
    """
    arrays, together = arrays_apart(args)
    inputs %= len(args)
    of_inputs = [i == inputs for i, arg in enumerate(args) for _ in arrays_apart(arg)[0]]
    is_input = [
        mine and _has_axis(x, sequence_axis) for mine, x in zip(of_inputs, arrays, strict=True)
    ]
    if not any(is_input):
        shapes = [np.shape(x) for x, mine in zip(arrays, of_inputs, strict=True) if mine]
        raise ValueError(
            f"No array of argument {inputs}, which has {shapes}, has an axis {sequence_axis} of "
            "positions. Set inputs= or sequence_axis=."
        )
    wide = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    weights = tuple(i for i, x in enumerate(arrays) if not of_inputs[i] and wide(x))
    total = lambda *arrays: total_of(f(*together(arrays)))
    with explaining():
        forward = jax.make_jaxpr(total)(*arrays)
        gradient = jax.value_and_grad(total, weights) if weights else total
        report = report_of(jax.make_jaxpr(gradient)(*arrays), args)
    reading = _Reading()
    roles: dict[int | None, Role] = {0: "sequences", sequence_axis: "positions"}
    given = [roles if mine else {} for mine in is_input]
    notes = without_arrays(map(_note_of_argument, arrays, given))
    interpreter.run(reading, forward.jaxpr, forward.consts, notes)
    once = lambda paths: tuple(dict.fromkeys(paths))
    later, sequences = (once(reading.shared[role]) for role in _ROLES)
    return ProgramCheck(report, reading.tensors(), later, sequences, once(reading.unknown))


@dataclass(frozen=True)
class _Note:
    """Say what is known of an array while the program is read."""

    axes: Axes | None  # None: not known
    depends: bool = False  # on the inputs
    mixed: frozenset[Role] = frozenset()  # roles that an amax of the inputs no longer tells apart
    cut: frozenset[Role] = frozenset()  # roles of which it has one of several
    root: Any = field(default_factory=object)  # the tensor of which this is a cast or another form
    casts: tuple[str, ...] = ()  # the dtypes that it had since it was computed
    was_fp8: bool = False  # it was rounded to FP8
    over: tuple[Factor, ...] = ()  # the first dimension of the array that a loop takes slices of


def _has_axis(x: Any, sequence_axis: int | None) -> bool:
    """Return whether `x` has a batch, and after it the axis of positions, if there are any."""
    return np.ndim(x) > 0 if sequence_axis is None else 0 < sequence_axis < np.ndim(x)


def _note_of_argument(x: Any, roles: Mapping[int | None, Role]) -> _Note:
    """Return the note of an argument whose dimensions have these roles."""
    axes = [((roles.get(i), n),) if n > 1 else () for i, n in enumerate(np.shape(x))]
    return _Note(tuple(axes), depends=bool(roles), casts=(dtype_name(x),))


@dataclass(frozen=True)
class _Reading(Reader):
    """Reads the forward pass, and collects what `check_program` tells."""

    computes = False

    shared: dict[Role, list[str]] = field(default_factory=lambda: {role: [] for role in _ROLES})
    unknown: list[str] = field(default_factory=list)
    found: dict[Any, list[tuple[str, _Note, object]]] = field(default_factory=dict)

    def tensors(self) -> tuple[Quantized, ...]:
        """Return what became operands of FP8 matmuls."""
        return tuple(
            Quantized(
                tuple(dict.fromkeys(path for path, _, _ in uses)),
                uses[0][1].casts,
                len({id(made) for _, _, made in uses}),
                any(value.was_fp8 for _, value, _ in uses),
            )
            for uses in self.found.values()
        )

    def constant(self, x: Any) -> _Note:
        return _Note(plain_axes(np.shape(x)))

    def equation(self, eqn: Any, ins: list[Value], at: Place) -> Computed:
        """Read matmuls and casts, which are functions with names."""
        called = str(eqn.params.get("name", ""))
        given = notes_in(ins)
        if called.startswith(PRODUCT_NAME):
            self.product(eqn, given, at.stack)
            made = [_Note(note.axes, note.depends) for note in self.inside(eqn, ins, at)]
        elif called == "quantized" and given:  # Flax may take a constant part out of a loop
            first, *others = self.inside(eqn, ins, at)
            casts = (*given[0].casts, dtype_name(eqn.outvars[0].aval))
            tensor = dataclasses.replace(given[0], casts=casts), object()
            made = [dataclasses.replace(first, root=tensor), *others]
        else:
            return None
        return without_arrays(made), []

    def inside(self, eqn: Any, ins: list[Value], at: Place) -> list[_Note]:
        """Read a call."""
        return notes_in(interpreter.enter(self, eqn, ins, at)[0])

    def flow(self, eqn: Any, ins: Sequence[Value]) -> list[_Note]:
        given = notes_in(ins)
        if eqn.primitive.name == "select_n" and not given[0].depends:
            if eqn.outvars[0].aval.size == 1:
                # A state says whether its history has entries: after the first step it does.
                given = [note for note in given if not note.depends]
        return [self.result(eqn, given, v) for v in eqn.outvars]

    def closed_to(self, eqn: Any, ins: Sequence[Value], at: Place) -> list[Value]:
        note = _joined(notes_in(ins), None)
        return without_arrays(dataclasses.replace(note, root=object()) for _ in eqn.outvars)

    def in_loop(self, eqn: Any, notes: list[Any], at: Place, n_fixed: int, n: int) -> list[_Note]:
        """Take the first dimension off slices, and note what later iterations carry."""
        inside = [*notes[:n], *map(_slice_of, notes[n:])]
        closed = eqn.params["jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"]
        while True:
            values = without_arrays(inside)
            made = notes_in(interpreter.run(_Reading(), closed.jaxpr, closed.consts, values, at)[0])
            triples = zip(inside[n_fixed:n], made, closed.out_avals)
            carried = [_also(first, later, aval.shape) for first, later, aval in triples]
            if carried == inside[n_fixed:n]:
                return inside
            inside[n_fixed:n] = carried

    def after(self, eqn: Any, inside: list[Any], results: list[list[Any]]) -> Sequence[_Note]:
        """Join the results of branches, and stack the results of iterations."""
        if eqn.primitive.name == "cond":
            pairs = zip(zip(*results, strict=True), eqn.outvars, strict=True)
            return [
                functools.reduce(lambda a, b: _also(a, b, v.aval.shape), notes)
                for notes, v in pairs
            ]
        if eqn.primitive.name != "scan":
            return super().after(eqn, inside, results)
        n_fixed, n_carry = scan_sizes(eqn)
        dims = [note.over for note in inside[n_fixed + n_carry :]]
        plain = ((None, eqn.params["length"]),) if eqn.params["length"] > 1 else ()
        over = next((dim for dim in dims if any(role for role, _ in dim)), plain)
        outer = lambda v: dataclasses.replace(v, axes=None if v.axes is None else (over, *v.axes))
        return [*results[0][:n_carry], *map(outer, results[0][n_carry:])]

    def result(self, eqn: Any, ins: list[_Note], v: Any) -> _Note:
        """Return what is known of a result of an equation without a body."""
        name = primitive_name(eqn)
        axes = moved_axes(eqn, [note.axes for note in ins], v.aval.shape)
        known: dict[str, Any] = {}
        note = _joined(ins, axes)
        if not note.depends:
            known["axes"] = plain_axes(v.aval.shape)
        elif name == "reduce_max":
            known["mixed"] = note.mixed | _lost(ins[0].axes, axes, v)
        elif name in CUTS:
            known["cut"] = note.cut | roles_of([ins[0].axes]) - roles_of([axes])
        elif name in ("concatenate", "stack") and sum(bool(x.cut) for x in ins) > 1:
            known["axes"] = None
        if name in _SAME | {"convert_element_type"} and ins:
            cast = () if name in _SAME else (dtype_name(v.aval),)
            known |= {"root": ins[0].root, "casts": (*ins[0].casts, *cast)}
        is_number = jnp.issubdtype(v.aval.dtype, jnp.floating)
        kept = note.was_fp8 and (name in _SAME | _OF_BYTES or not is_number)
        return dataclasses.replace(note, **known, was_fp8=kept or v.aval.dtype in F8_NAMES)

    def product(self, eqn: Any, ins: list[_Note], stack: str) -> None:
        """Note the operands of an FP8 matmul, and what the scale of the first depends on."""
        path = product_path(notes_of(stack)) or "(no layer)"
        invars, ins = without_copy(eqn, eqn.invars), without_copy(eqn, ins)
        data = [i for i, v in enumerate(invars) if v.aval.dtype in F8_NAMES and v.aval.ndim][:2]
        for i in data:
            if isinstance(ins[i].root, tuple):
                tensor, made = ins[i].root
                key = tensor.root, tensor.casts[-1]
                self.found.setdefault(key, []).append((path, tensor, made))
        if not data or not ins[data[0]].depends:
            return
        whole, end = ins[data[0]], data[1] if len(data) > 1 else len(ins)
        scales = list(zip(invars, ins, strict=True))[data[0] + 1 : end]
        for role in _ROLES:
            found = [_shared(role, whole, invars[data[0]], *scale) for scale in scales]
            if role in whole.mixed or True in found:
                self.shared[role].append(path)
            elif None in found:
                self.unknown.append(path)


def _shared(role: Role, whole: _Note, data: Any, v: Any, scale: _Note) -> bool | None:
    """Return whether a scale of `data` is from several elements of a role, or None if unknown."""
    if not scale.depends:
        return False
    if role in scale.mixed:
        return True
    if scale.axes is not None and whole.axes is not None:
        return size_of(scale.axes, role) < size_of(whole.axes, role)
    if v.aval.size == 1:
        return True
    return False if v.aval.shape[:-1] == data.aval.shape[:-1] else None  # each row has its own


def _slice_of(note: _Note) -> _Note:
    if note.axes is None:
        return dataclasses.replace(note, over=())
    return dataclasses.replace(note, axes=note.axes[1:], over=note.axes[0])


def _joined(values: Sequence[_Note], axes: Axes | None) -> _Note:
    both = lambda name: frozenset().union(*(getattr(value, name) for value in values))
    some = lambda name: any(getattr(value, name) for value in values)
    return _Note(axes, some("depends"), both("mixed"), both("cut"), was_fp8=some("was_fp8"))


def _also(first: _Note, other: _Note, shape: Sequence[int]) -> _Note:
    """Return the note of an array that may be either."""
    both = _joined([first, other], joined_axes([first.axes, other.axes], shape))
    return dataclasses.replace(both, root=first.root, casts=first.casts)


def _lost(before: Axes | None, after: Axes | None, v: Any) -> frozenset[Role]:
    """Return the roles that a reduction to `v` merges altogether."""
    if v.aval.size == 1 and before is None:
        return frozenset(_ROLES)
    if before is None or after is None:
        return frozenset()
    return frozenset(r for r in _ROLES if size_of(before, r) > 1 and size_of(after, r) == 1)
