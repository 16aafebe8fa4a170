"""Count parameters and FP8 state of a model separately."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from jfp8.conversion.tables import Printed, Table, ruled_lines
from jfp8.layers.linen.state_in_gradients import OVERWRITTEN
from jfp8.layers.nnx.products import Fp8Sink, Fp8State
from jfp8.scaling import printing
from jfp8.scaling.trees import is_scaled_array
from jfp8.training.state import TrainState


@dataclass(frozen=True)
class Amount:
    """Count and size of some arrays.

    Attributes:
      count: elements. An element in FP8 counts as one, whatever scales it has.
      bytes: bytes of the elements, scales included.
    """

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.count + other.count, self.bytes + other.bytes)


@dataclass(frozen=True)
class SummaryRow:
    """Variables of a module.

    Attributes:
      path: ``"encoder/Dense_0"``; empty for the model itself.
      params: parameters.
      params_in_fp8: parameters that are stored in FP8 (`ScaledArray`).
      fp8_state: amax histories, without the zeros (``fp8_sink``) whose gradient carries amaxes.
      other: all other variables, such as ``batch_stats``.
    """

    path: str
    params: Amount = Amount()
    params_in_fp8: Amount = Amount()
    fp8_state: Amount = Amount()
    other: Amount = Amount()

    def __add__(self, other: SummaryRow) -> SummaryRow:
        amounts = {kind: getattr(self, kind) + getattr(other, kind) for kind in _COLUMNS}
        return SummaryRow(self.path, **amounts)


# The amounts of a row, and what they are called in a table.
_COLUMNS = {
    "params": "parameters",
    "params_in_fp8": "of them in FP8",
    "fp8_state": "FP8 state",
    "other": "other",
}


@dataclass(frozen=True, repr=False)
class Summary(Printed):
    """Result of `summary`; prints as a table.

    Attributes:
      model: name of its class.
      rows: every module that holds variables itself, by name. FP8 state counts for the module with
        the parameters that it belongs to.
      depth: levels of modules in the printed table; deeper modules are added up.
      optimizer: the optimizer's state, if a `TrainState` was given.
    """

    model: str
    rows: tuple[SummaryRow, ...]
    depth: int
    optimizer: Amount | None = None

    @property
    def total(self) -> SummaryRow:
        """Return the sum of all modules."""
        return sum(self.rows, SummaryRow("total"))

    def at_depth(self, depth: int) -> tuple[SummaryRow, ...]:
        """Return the rows of modules up to `depth` levels deep, each with all modules in it."""
        found: dict[str, SummaryRow] = {}
        for row in self.rows:
            path = "/".join(row.path.split("/")[:depth])
            found[path] = found.get(path, SummaryRow(path)) + row
        return tuple(found.values())

    def __str__(self) -> str:
        head, rule, *rows, total = ruled_lines(self._table(), numbers=True)
        return "\n".join([self._headline(), "", head, rule, *rows, rule, total])

    def _headline(self) -> str:
        total = self.total
        parts = [f"{printing.counted(total.params.count, 'parameter')}, {_size(total.params)}"]
        if total.params_in_fp8.count:
            parts[0] += f" ({100 * total.params_in_fp8.count / total.params.count:.1f} % in FP8)"
        if total.fp8_state.count:
            parts.append(f"FP8 state {_size(total.fp8_state)}")
        if total.other.count:
            parts.append(f"other variables {_size(total.other)}")
        if self.optimizer is not None:
            parts.append(f"optimizer state {_size(self.optimizer)}")
        return f"{self.model}: {'; '.join(parts)}"

    def _table(self) -> Table:
        total = self.total
        columns = [kind for kind in _COLUMNS if kind == "params" or getattr(total, kind).count]
        table = [["module", *(text for kind in columns for text in (_COLUMNS[kind], "bytes"))]]
        for row in (*self.at_depth(self.depth), total):
            table.append([row.path or "(the model itself)"])
            for amount in (getattr(row, kind) for kind in columns):
                table[-1] += [f"{amount.count:,}", _size(amount)] if amount.count else ["", ""]
        return table


def summary(model: Any, variables: Any = None, *, depth: int = 2) -> Summary:
    """Count parameters and FP8 state of a model, per module and in total.

    ``flax.linen.tabulate`` adds FP8 state to the parameters. Here they are separate, and parameters
    in FP8 count with the bytes that they take: one each, plus their scales.

    Args:
      model: a Linen or an NNX module.
      variables: for Linen the result of ``model.init`` (or its shapes, by ``jax.eval_shape``), or a
        `TrainState`, whose optimizer state is then counted too. For NNX leave it out.
      depth: levels of modules to print; ``summary(...).rows`` has all.

    Returns:
      A `Summary`: ``print`` it, or read ``.total``, ``.rows``, ``.at_depth(n)``.

    Raises:
      TypeError: `model` is not a model; a Linen module without variables, an NNX module with some.
      ValueError: `depth` below 1.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> model, x = jfp8.Dense(8), jnp.ones((1, 4))
    >>> print(jfp8.summary(model, model.init(jax.random.key(0), x)))
    Dense: 40 parameters, 160 B; FP8 state 208 B
    <BLANKLINE>
    module              parameters  bytes  FP8 state  bytes
    -------------------------------------------------------
    (the model itself)          40  160 B         52  208 B
    -------------------------------------------------------
    total                       40  160 B         52  208 B
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"depth={depth!r}: must be an int of at least 1, such as 2.")
    optimizer = None
    if isinstance(model, nnx.Module):
        if variables is not None:
            raise TypeError(
                "An NNX module holds its variables: call summary(model), without "
                f"{type(variables).__name__}."
            )
        found = _of_nnx(model)
    elif isinstance(model, nn.Module):
        if isinstance(variables, TrainState):
            optimizer = _amount(variables.opt_state)
            variables = variables.variables
        if not isinstance(variables, Mapping) or "params" not in variables:
            given = sorted(variables) if isinstance(variables, Mapping) else variables
            raise TypeError(
                "summary(model, variables): variables must be all that model.init returned, with "
                f"'params' in it, or a jfp8.TrainState; got "
                f"{given if isinstance(given, list) or given is None else type(given).__name__}."
            )
        found = _of_linen(variables)
    else:
        raise TypeError(
            f"model must be an instance of a Flax Linen or NNX module, got {type(model).__name__}. "
            "Pass summary(model, variables) for Linen and summary(model) for NNX."
        )
    return Summary(type(model).__name__, _rows(found), depth, optimizer)


# The path of the module that holds a variable, the kind of the variable, and its value.
_Variable = tuple[tuple[str, ...], str, Any]


def _of_linen(variables: Mapping[str, Any]) -> Iterator[_Variable]:
    kinds = {"params": "params", "fp8": "fp8_state", OVERWRITTEN: "fp8_state"}
    for collection, tree in variables.items():
        # Sinks are zeros that nobody keeps, and differentiation can make new ones.
        tree = {} if collection == "fp8_sink" else tree
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array):
            # Boxes around arrays (nn.Partitioned) add keys that are not names of modules.
            names = [str(key.key) for key in path if hasattr(key, "key")]
            yield tuple(names[:-1]), kinds.get(collection, "other"), leaf


def _of_nnx(model: nnx.Module) -> Iterator[_Variable]:
    for path, node in nnx.iter_graph(model, graph=True):
        if isinstance(node, nnx.Variable) and not isinstance(node, Fp8Sink):
            kind = "params" if isinstance(node, nnx.Param) else "other"
            if isinstance(node, Fp8State):
                kind = "fp8_state"
            yield tuple(map(str, path[:-1])), kind, node.get_value()


def _rows(variables: Iterable[_Variable]) -> tuple[SummaryRow, ...]:
    """Return a row for each module, FP8 state in the innermost module with parameters."""
    found = list(variables)
    with_params = {owner for owner, kind, _ in found if kind == "params"}
    rows: dict[tuple[str, ...], SummaryRow] = {}
    for owner, kind, value in found:
        if kind == "fp8_state":
            owners = (owner[:n] for n in range(len(owner), -1, -1))
            owner = next((o for o in owners if o in with_params), owner)
        amounts = {kind: _amount(value)}
        if kind == "params" and is_scaled_array(value):
            amounts["params_in_fp8"] = amounts["params"]
        rows[owner] = rows.get(owner, SummaryRow("/".join(owner))) + SummaryRow("", **amounts)
    return tuple(sorted(rows.values(), key=lambda row: printing.natural(row.path)))


def _amount(tree: Any) -> Amount:
    whole = filter(printing.is_arraylike, jax.tree.leaves(tree, is_leaf=is_scaled_array))
    return Amount(
        sum(math.prod(x.shape) for x in whole), sum(map(printing.n_bytes, jax.tree.leaves(tree)))
    )


def _size(amount: Amount) -> str:
    return printing.byte_size(amount.bytes)
