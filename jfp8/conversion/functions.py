"""Convert functions of arrays: their matmuls with weights become FP8, whatever library wrote them.

The function is traced, and its program computed by a `Walk` that hands each matmul with a weight to
jfp8. All that a matmul has to remember is one array, whose gradient is its next value (see
`scaling.state_in_gradients`): so a loop only differentiates with respect to the state, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.conversion import edges
from jfp8.conversion.causal import masks_later_positions
from jfp8.conversion.function_plan import Plan, PlannedMatmul, key_of
from jfp8.conversion.selection import Selection
from jfp8.conversion.weight_matmul import Source, WeightMatmul
from jfp8.conversion.weight_walk import Walk
from jfp8.layers.options import kernel_dtype
from jfp8.products.conv import convolutions
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.operation import Options, State
from jfp8.products.ragged.dot import scaled_ragged_dot
from jfp8.products.slower import why_slower
from jfp8.recipes import in_effect as region
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.state_in_gradients import read_overwritten, steps_of
from jfp8.tracing.notes import EXPLAINING, layer_noted, note

Histories = dict[str, jax.Array]


@dataclass(frozen=True)
class Fp8Function:
    """A function with FP8 matmuls: what `jfp8.convert` makes of a function.

    Call it like the function, with the state after the last argument that holds weights; or without
    one, if no matmul has a recipe that keeps amax histories.

    Attributes:
      function: the original.
      selection: the arguments of `jfp8.convert`, checked.
      weights: the positions of the arguments that hold weights.
    """

    function: Callable[..., Any]
    selection: Selection
    weights: tuple[int, ...] = (0,)

    @property
    def __name__(self) -> str:
        """Return the name of the original, which JAX gives to compiled programs."""
        return _name(self.function)

    def init(self, *args: Any, **kwargs: Any) -> Histories:
        """Return the state before the first step; only shapes of the arguments matter.

        Args:
          *args, **kwargs: of the function, without a state; arrays or ``jax.ShapeDtypeStruct`` s.

        Returns:
          ``{name of a matmul: f32[3 * (2050 + 31 H)]}``, zeros, with a leading axis for each
          ``scan`` over stacked weights; ``{}`` if no recipe keeps histories.
        """
        plan = self._plan(_Traced.of(self, args, kwargs))
        self.selection.check_patterns([matmul.name for matmul in plan.matmuls.values()])
        return {name: jnp.zeros(shape) for name, shape in plan.states.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function does, computed with FP8 matmuls."""
        here = region.current()
        if here is not None and not here.enabled:
            return self.function(*self._without_state(args)[0], **kwargs)
        arguments, given = self._without_state(args)
        traced = _Traced.of(self, arguments, kwargs)
        plan = self._plan(traced)
        states = self._checked(plan, given, args)
        if EXPLAINING.value is None:
            plan.warn(self.__name__, self.weights)
        compute = functools.partial(_computed, plan)
        loops = {each.name: [place for place, _ in each.loops] for each in plan.matmuls.values()}
        walk = Walk(compute, loops, self.selection.attention)
        return traced.together(traced.run(walk, traced.arrays, states))

    def _without_state(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """Take the state, a dict that `init` made, out of the arguments, if it is there."""
        place = max(self.weights) + 1
        given = args[place] if len(args) > place else None
        if not _is_state(given):
            return args, None
        return args[:place] + args[place + 1 :], given

    def _checked(self, plan: Plan, given: Any, args: tuple[Any, ...]) -> Histories:
        """Return the state that was given, or raise ``ValueError`` if it is another's."""
        needed, given = plan.states, {} if given is None else dict(given)
        place = max(self.weights) + 1
        if needed and not given:
            got = type(args[place]).__name__ if len(args) > place else "nothing"
            raise ValueError(
                f"The recipe keeps amax histories, so argument {place} must be the state; got "
                f"{got}. Make it once, state = f.init(params, batch), and call f(params, state, "
                "batch). Its gradient is its next value: "
                f"jax.value_and_grad(f, argnums=({place - 1}, {place})). Recipes without state, "
                'such as "current", need none.'
            )
        if set(given) != set(needed):
            missing, unknown = sorted(set(needed) - set(given)), sorted(set(given) - set(needed))
            raise ValueError(
                f"The state belongs to other matmuls: it lacks {missing}, and has {unknown}. Make "
                "it by init of this function, with arguments of the same structure."
            )
        for name, shape in needed.items():
            if given[name].shape != shape:
                raise ValueError(
                    f"The state of {name!r} has shape {given[name].shape}; {shape} is needed. It "
                    "belongs to another recipe, or to another number of layers: make it by init."
                )
        return given

    def _plan(self, traced: _Traced) -> Plan:
        """Find all matmuls with weights, and decide which become FP8."""
        plan = Plan(self.selection, traced.closed.consts)
        walk = Walk(plan.see, {}, self.selection.attention)
        with region.entered(edges.LOOKING):
            looked = jax.make_jaxpr(lambda *arrays: traced.run(walk, arrays, {}))(*traced.arrays)
        first, ends = edges.edge_layers(looked, traced.n_weights, of_loss=traced.is_loss)
        causal = masks_later_positions(looked, traced.arrays)
        plan.decide(first, ends, causal)
        return plan


def convert_function(
    function: Callable[..., Any], selection: Selection, weights: int | Sequence[int]
) -> Fp8Function:
    """Return `function` with FP8 matmuls; see `jfp8.convert`."""
    if isinstance(function, Fp8Function):
        function = function.function
    held = (function, *(getattr(function, name, None) for name in ("__self__", "args")))
    if any(np.ndim(x) >= 2 for x in jax.tree.leaves(held) if isinstance(x, jax.Array)):
        raise TypeError(
            f"{_name(function)} holds its weights itself, and functions take them as an argument: "
            "jfp8.convert(lambda model, x: model(x), recipe), called with the model, state and x."
        )
    places = (weights,) if isinstance(weights, int) else tuple(weights)
    if not places or not all(isinstance(i, int) and i >= 0 for i in places):
        raise ValueError(
            f"weights={weights!r}: must be the position of the argument that holds the weights, "
            "such as 0, or several positions."
        )
    return Fp8Function(function, selection, places)


def _is_state(given: Any) -> bool:
    """Tell whether an argument is what `Fp8Function.init` returned, or its shapes."""
    if not isinstance(given, Mapping):
        return False
    # The gradient of a state of such a shape is its next value.
    is_state = lambda x: steps_of(getattr(x, "shape", ())[-1:]) is not None
    return all(isinstance(k, str) and is_state(x) for k, x in given.items())


@dataclass(frozen=True)
class _Traced:
    """A traced function."""

    closed: Any
    arrays: Sequence[Any]  # arguments; the first `n_weights` are weights
    n_weights: int
    paths: tuple[str, ...]  # of the weights
    together: Callable[[Any], Any]  # makes the result of the arrays in it
    is_loss: bool  # the first array of the result is a number

    @classmethod
    def of(cls, converted: Fp8Function, args: tuple[Any, ...], kwargs: Any) -> _Traced:
        if len(args) <= max(converted.weights):
            raise TypeError(
                f"{_name(converted.function)} was called with {len(args)} positional arguments, "
                f"but its weights are argument {max(converted.weights)} (weights= of "
                "jfp8.convert). Pass them by position."
            )
        of_weights = [args[i] for i in converted.weights]
        rest = [None if i in converted.weights else arg for i, arg in enumerate(args)]
        weights, whole_weights = edges.arrays_apart(of_weights)
        others, whole_others = edges.arrays_apart((rest, kwargs))
        paths = _paths_of(converted, of_weights)
        outside: list[Any] = []

        def flat(*arrays: Any) -> Any:
            rest, kwargs = whole_others(arrays[len(weights) :])
            for i, arg in zip(converted.weights, whole_weights(arrays[: len(weights)])):
                rest[i] = arg
            found, together = edges.arrays_apart(converted.function(*rest, **kwargs))
            outside[:] = [together]
            return found

        arrays = [*weights, *others]
        closed = jax.make_jaxpr(flat)(*arrays)
        is_loss = bool(closed.out_avals) and closed.out_avals[0].ndim == 0
        return cls(closed, arrays, len(weights), paths, outside[0], is_loss)

    def run(self, walk: Walk, arrays: Sequence[Any], states: Histories) -> list[Any]:
        """Compute the arrays of the result as `walk` says."""
        sources: list[Source | None] = [None] * len(arrays)
        for i, path in enumerate(self.paths):
            if jnp.issubdtype(jnp.result_type(arrays[i]), jnp.floating):
                sources[i] = Source(path)
        closed = self.closed
        return walk.run(closed.jaxpr, closed.consts, arrays, sources, states)[0]


def _paths_of(converted: Fp8Function, trees: Sequence[Any]) -> tuple[str, ...]:
    """Return the path of each array in the arguments that hold weights: ``"layers/0/w"``."""
    paths = []
    for i, tree in zip(converted.weights, trees, strict=True):
        name = _argument(converted.function, i)
        for keys, leaf in jax.tree.leaves_with_path(tree):
            if edges.arrays_apart(leaf)[0]:
                path = jax.tree_util.keystr(keys, simple=True, separator="/")
                above = (name,) if len(trees) > 1 or not path else ()
                paths.append("/".join([*above, *([path] if path else [])]))
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ValueError(f"Two weights have the path {twice[0]!r}. Rename one of them.")
    return tuple(paths)


def _argument(function: Callable[..., Any], position: int) -> str:
    try:
        return list(inspect.signature(function).parameters)[position]
    except (ValueError, TypeError, IndexError):
        return f"weights_{position}"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _computed(plan: Plan, matmul: WeightMatmul) -> jax.Array:
    planned = plan.matmuls[key_of(matmul)]
    recipe, reason = planned.decision.recipe, planned.decision.reason
    gpu = plan.selection.unless_slower_on
    if recipe is not None and gpu is not None:
        reason = why_slower(gpu, recipe, matmul.plain, matmul.x, matmul.weight)
    if recipe is None or reason:
        with layer_noted(planned.name, planned.layer, reason):
            return matmul.plain()
    return _in_fp8(matmul, recipe, planned)


def _in_fp8(matmul: WeightMatmul, recipe: Recipe, planned: PlannedMatmul) -> jax.Array:
    histories, sink = None, None
    if planned.state is not None:
        histories, sink = read_overwritten(matmul.states[planned.name], recipe.init_state())
    weight = matmul.weight if matmul.source.in_f32 is None else matmul.source.in_f32
    options = Options(recipe, None, kernel_dtype(matmul.x, weight, casts_kernel=True))
    state = State(histories, sink)
    dtype = matmul.eqn.outvars[0].aval.dtype
    ahead = "later positions" if planned.looks_ahead else ""
    with (
        layer_noted(planned.name, planned.layer, ""),
        note("recipe", recipe.name),
        note("ahead", ahead),
    ):
        params, how = matmul.eqn.params, {"preferred_element_type": dtype}
        if matmul.primitive == "ragged_dot_general":
            how |= {"state": state.histories, "sink": state.sink}
            return scaled_ragged_dot(matmul.x, weight, matmul.others[0], recipe=recipe, **how)
        if matmul.primitive == "conv_general_dilated":
            names = inspect.signature(convolutions).parameters
            kept = {name: params[name] for name in names if name in params}
            quantized, _ = convolutions(**kept | how)
            return quantized(matmul.x, weight, options=options, state=state)[0]
        dot = lambda x, w, numbers: observed_dot_general(
            x, w, numbers, options, state, **how, out_sharding=params.get("out_sharding")
        )[0]
        return matmul.by(dot, weight)
