"""Small programs of FP8 layers, drawn at random, and what their products see, computed by NumPy.

A program is a value. It can be built of any package's Linen layers, and NumPy can run it in
float64, forward and backward, which is the oracle: it knows every operand of every product, and has
neither histories nor sinks nor quantizers.

For the two to agree to the last bit the numbers are chosen so that FP8 loses nothing: weights are
signed permutations times powers of two, activations and gradients have two bits of mantissa, and
scales are powers of two with enough headroom. Each sum then has one term, or few bits.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import numpy as np
from hypothesis import strategies as st

WIDTH = 8  # all layers are square, so that any may follow any
ROWS = 16
COLLECTIONS = ("params", "fp8", "fp8_sink")


@dataclass
class Uses:
    """What the products at one place saw: an amax for each use, by role, and the gradient."""

    amaxes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gradient: np.ndarray | float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a weight is: the path of its layer, and its index in a stack of layers."""

    path: tuple[str, ...] = ()
    index: tuple[int, ...] = ()

    def inside(self, name: str) -> Place:
        return Place((*self.path, name), self.index)

    def number(self, i: int) -> Place:
        return Place(self.path, (*self.index, i))


def leaf(tree: Any, place: Place, names: Sequence[str] = ("kernel",)) -> np.ndarray:
    """Return the array of one place, out of a stack or not."""
    for name in (*place.path, *names):
        tree = tree[name]
    return np.asarray(tree)[place.index]


@dataclass(frozen=True)
class Program:
    """A function of rows, f32[rows, WIDTH] to the same shape.

    ``linen(layer)`` is a Linen module of layers that `layer` makes. ``run(x, at, weights, seen)``
    returns the result, and a function from its gradient to the gradient of `x`. Both record in
    `seen`.
    """


@dataclass(frozen=True)
class Layer(Program):
    """``x @ kernel``."""

    def linen(self, layer):
        return layer()

    def run(self, x, at, weights, seen):
        w, uses = weights(at), seen[at]

        def pullback(dy):
            uses.gradient = uses.gradient + x.T @ dy
            for role, operand in (("lhs", x), ("rhs", w), ("grad", dy)):
                uses.amaxes[role].append(float(np.max(np.abs(operand))))
            return dy @ w.T

        return x @ w, pullback


@dataclass(frozen=True)
class Relu(Program):
    """``max(x, 0)``."""

    def linen(self, layer):
        return nn.relu

    def run(self, x, at, weights, seen):
        return np.maximum(x, 0), lambda dy: np.where(x > 0, dy, 0)


@dataclass(frozen=True)
class Chain(Program):
    """One after the other: ``nn.Sequential``."""

    parts: tuple[Program, ...]

    def linen(self, layer):
        return nn.Sequential([part.linen(layer) for part in self.parts])

    def run(self, x, at, weights, seen):
        places = [at.inside(f"layers_{i}") for i in range(len(self.parts))]
        return run_in_turn(zip(self.parts, places), x, weights, seen)


@dataclass(frozen=True)
class Repeat(Program):
    """The same layers again, so that each is used several times."""

    part: Program
    times: int

    def linen(self, layer):
        return Repeated(self.part.linen(layer), self.times)

    def run(self, x, at, weights, seen):
        return run_in_turn([(self.part, at.inside("part"))] * self.times, x, weights, seen)


@dataclass(frozen=True)
class Remat(Program):
    """Computed again in the backward pass: ``nn.remat``."""

    part: Program

    def linen(self, layer):
        return nn.remat(Repeated)(self.part.linen(layer), 1)

    def run(self, x, at, weights, seen):
        return self.part.run(x, at.inside("part"), weights, seen)


@dataclass(frozen=True)
class Scan(Program):
    """``nn.scan`` over layers, each with its own weights, or all with the same."""

    part: Program
    length: int
    shared: bool

    def linen(self, layer):
        return Scanned(self.part.linen(layer), self.length, self.shared)

    def run(self, x, at, weights, seen):
        inside = at.inside("part")
        places = [inside if self.shared else inside.number(i) for i in range(self.length)]
        return run_in_turn([(self.part, place) for place in places], x, weights, seen)


@dataclass(frozen=True)
class Vmap(Program):
    """``nn.vmap`` over groups of rows, with weights for each (experts), or the same for all."""

    part: Program
    groups: int
    shared: bool

    def linen(self, layer):
        return Mapped(self.part.linen(layer), self.groups, self.shared)

    def run(self, x, at, weights, seen):
        inside = at.inside("part")
        done = [
            self.part.run(rows, inside if self.shared else inside.number(i), weights, seen)
            for i, rows in enumerate(np.split(x, self.groups))
        ]
        pullback = lambda dy: np.concatenate(
            [back(rows) for (_, back), rows in zip(done, np.split(dy, self.groups))]
        )
        return np.concatenate([y for y, _ in done]), pullback


def run_in_turn(programs, x, weights, seen):
    """Programs at their places, one after the other, and back in the reverse order."""
    pullbacks = []
    for program, place in programs:
        x, pullback = program.run(x, place, weights, seen)
        pullbacks.append(pullback)
    return x, lambda dy: functools.reduce(lambda dy, back: back(dy), reversed(pullbacks), dy)


# Linen modules of the above.


class Repeated(nn.Module):
    part: nn.Module
    times: int

    def __call__(self, x):
        for _ in range(self.times):
            x = self.part(x)
        return x


class Scanned(nn.Module):
    part: nn.Module
    length: int
    shared: bool

    @nn.compact
    def __call__(self, x):
        lifted = (
            {"variable_broadcast": COLLECTIONS}
            if self.shared
            else {"variable_axes": dict.fromkeys(COLLECTIONS, 0)}
        )
        scan = nn.scan(
            lambda part, x, _: (part(x), None),
            **lifted,
            split_rngs={"params": not self.shared},
            length=self.length,
        )
        return scan(self.part, x, None)[0]


class Mapped(nn.Module):
    part: nn.Module
    groups: int
    shared: bool

    @nn.compact
    def __call__(self, x):
        vmap = nn.vmap(
            lambda part, x: part(x),
            variable_axes=dict.fromkeys(COLLECTIONS, None if self.shared else 0),
            split_rngs={"params": not self.shared},
            axis_size=self.groups,
        )
        return vmap(self.part, x.reshape(self.groups, -1, WIDTH)).reshape(x.shape)


# Properties of programs


def overflowed(seen: dict[Place, Uses]) -> bool:
    """Whether any operand or gradient was not finite."""
    return not all(
        np.all(np.isfinite(uses.gradient)) and np.all(np.isfinite(list(uses.amaxes.values())))
        for uses in seen.values()
    )


def depth(program: Program) -> int:
    """How many products there are one after the other."""
    match program:
        case Layer():
            return 1
        case Relu():
            return 0
        case Chain(parts):
            return sum(map(depth, parts))
        case Repeat(part, times) | Scan(part, times, _):
            return depth(part) * times
        case Remat(part) | Vmap(part):
            return depth(part)
    raise TypeError(program)


def programs(
    *, shared: bool = True, relu: bool = True, deepest: int = 4
) -> st.SearchStrategy[Program]:
    """Programs of at most `deepest` products in a row; `shared`: layers may be used repeatedly."""

    def larger(parts):
        sharing = st.booleans() if shared else st.just(False)
        return st.one_of(
            st.lists(parts, min_size=1, max_size=3).map(lambda ps: Chain(tuple(ps))),
            st.builds(Remat, parts),
            st.builds(Scan, parts, st.integers(1, 3), sharing),
            st.builds(Vmap, parts, st.just(2), sharing),
            *([st.builds(Repeat, parts, st.just(2))] if shared else []),
        )

    leaves = st.sampled_from([Layer(), Chain((Layer(), Relu()))] if relu else [Layer()])
    parts = st.lists(st.recursive(leaves, larger, max_leaves=3), min_size=1, max_size=3)
    return parts.map(lambda ps: ps[0] if len(ps) == 1 else Chain(tuple(ps))).filter(
        lambda program: depth(program) <= deepest and groups(program) <= 4
    )


def groups(program: Program) -> int:
    """Into how many groups the rows are split."""
    match program:
        case Chain(parts):
            return max(map(groups, parts))
        case Vmap(part, n, _):
            return n * groups(part)
        case Repeat(part) | Scan(part) | Remat(part):
            return groups(part)
    return 1


def scans_in_shared_scan(program: Program, inside: bool = False) -> bool:
    """Whether there is a scan in a scan that shares its weights."""
    match program:
        case Chain(parts):
            return any(scans_in_shared_scan(part, inside) for part in parts)
        case Scan(part, _, shared):
            return inside or scans_in_shared_scan(part, shared)
        case Repeat(part) | Remat(part) | Vmap(part):
            return scans_in_shared_scan(part, inside)
    return False
