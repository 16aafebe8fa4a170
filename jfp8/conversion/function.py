"""Convert functions of arrays: their matmuls with weights become FP8, whatever library wrote them.

All that a matmul has to remember is one array, whose gradient is its next value (see
`scaling.state_in_gradients`): so a loop only differentiates with respect to the state, too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax
import jax
import numpy as np

from jfp8.conversion.plan import Named, Plan, plan_of
from jfp8.conversion.program import Program
from jfp8.conversion.run import States, run_planned
from jfp8.conversion.selection import Selection
from jfp8.conversion.unconverted_warning import warn_of_nothing
from jfp8.conversion.weight_matmul import WeightMatmul
from jfp8.recipes import in_effect as region
from jfp8.tracing.caller import user_level
from jfp8.tracing.notes import EXPLAINING


class FunctionState(dict[str, jax.Array]):
    """The amax histories of a converted function, by the names of its matmuls: a pytree.

    Another type than a dict, so that no argument of the function is taken for it.
    """


_sorted: Callable[[Any], list[str]] = sorted
jax.tree_util.register_pytree_with_keys(
    FunctionState,
    lambda state: (
        [(jax.tree_util.DictKey(name), state[name]) for name in _sorted(state)],
        tuple(_sorted(state)),
    ),
    lambda names, arrays: FunctionState(zip(names, arrays, strict=True)),
)
flax.serialization.register_serialization_state(
    FunctionState, dict, lambda _, saved: FunctionState(saved)
)


@dataclass(frozen=True)
class Fp8Function:
    """A function with FP8 matmuls: what `jfp8.convert` makes of a function.

    Call it like the function, with the state after the last argument that holds weights, or as
    ``fp8_state=``; or without one, if no matmul has a recipe that keeps amax histories.

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

    def init(self, *args: Any, **kwargs: Any) -> FunctionState:
        """Return the state before the first step; only shapes of the arguments matter.

        Args:
          *args, **kwargs: the function's, without a state; arrays or ``jax.ShapeDtypeStruct`` s.

        Returns:
          ``{name of a matmul: f32[3 * (2050 + 31 H)]}``, zeros, with a leading axis for each
          ``scan`` over stacked weights; empty if no recipe keeps histories.
        """
        plan = self._plan(self._program(args, kwargs))
        self.selection.check_patterns(plan.by_name)
        return _init(plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function does, computed with FP8 matmuls."""
        arguments, kwargs, given = self._without_state(args, kwargs)
        if region.why_disabled():
            return self.function(*arguments, **kwargs)
        program = self._program(arguments, kwargs)
        plan = self._plan(program)
        states = self._checked(plan, given, args)
        if EXPLAINING.value is None:
            self._warn(plan)
        return run_planned(program, plan, states)[0]

    def _without_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Take the state out of the arguments: what `init` made, or a mapping where one is due."""
        kwargs = dict(kwargs)
        if (given := kwargs.pop("fp8_state", None)) is not None:
            return args, kwargs, given
        place = max(self.weights) + 1
        given = args[place] if len(args) > place else None
        keeps = any(recipe.init_state() is not None for recipe in self.selection.recipes)
        restored = keeps and isinstance(given, Mapping) and len(given) > 0
        if not isinstance(given, FunctionState) and not restored:
            return args, kwargs, None
        return args[:place] + args[place + 1 :], kwargs, given

    def _checked(self, plan: Plan, given: Any, args: tuple[Any, ...]) -> States:
        """Return the state that was given, or raise ``ValueError`` if it is another's."""
        needed = {name: x.shape for name, x in jax.eval_shape(partial(_init, plan)).items()}
        place, given = max(self.weights) + 1, {} if given is None else dict(given)
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
        return {name: plan.by_name[name].read_overwritten(x) for name, x in given.items()}

    def _program(self, args: tuple[Any, ...], kwargs: Any) -> Program:
        if len(args) <= max(self.weights):
            raise TypeError(
                f"{self.__name__} was called with {len(args)} positional arguments, "
                f"but its weights are argument {max(self.weights)} (weights= of "
                "jfp8.convert). Pass them by position."
            )
        call, weights, others = weights_apart(self.function, self.weights, args, kwargs)
        return Program.of(call, weights, self._paths(weights), others)

    def _plan(self, program: Program) -> Plan:
        is_loss = [getattr(y, "shape", None) for y in program.closed.out_avals[:1]] == [()]
        attention = self.selection.attention
        return plan_of(
            program, self._named, of_loss=is_loss, of_activations=attention, parts_apart=True
        )

    def _named(self, matmul: WeightMatmul, nth: int) -> Named:
        name = matmul.name if nth == 1 else f"{matmul.name}_{nth}"
        shape = jax.ShapeDtypeStruct(np.shape(matmul.weight), matmul.weight.dtype)
        return Named(name, name, shape, matmul.primitive, self.selection)

    def _paths(self, weights: Sequence[Any]) -> tuple[str, ...]:
        """Return the path of each leaf in the arguments that hold weights: ``"layers/0/w"``."""
        paths = []
        for i, tree in zip(self.weights, weights, strict=True):
            name = _argument(self.function, i)
            for keys, _ in Program.leaves_with_path(tree):
                path = jax.tree_util.keystr(keys, simple=True, separator="/")
                above = name if len(weights) > 1 or not path else ""
                paths.append("/".join(filter(None, [above, path])))
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise ValueError(f"Two weights have the path {twice[0]!r}. Rename one of them.")
        return tuple(paths)

    def _warn(self, plan: Plan) -> None:
        """Warn if nothing becomes FP8, if scales look ahead, or if `weights` seem to be others."""
        name, weights = self.__name__, f"argument {', '.join(map(str, self.weights))}"
        if plan.held:
            message = (
                f"{name} multiplies {weights} by arrays that it holds itself. If those are the "
                "weights, pass them as an argument: jfp8.convert(lambda params, x: ..., recipe), "
                "or weights= for another position."
            )
            warnings.warn(message, UserWarning, stacklevel=user_level())
        warn_of_nothing(name, plan.decisions, plan.unused, f"the weights, {weights} (see weights=)")
        plan.warn_ahead()


def weights_apart(
    function: Callable[..., Any], places: Sequence[int], args: Sequence[Any], kwargs: Any
) -> tuple[Callable[[Any, Any], Any], list[Any], Any]:
    """Return `function` of weights and other arguments, the weights in `args`, and the others."""

    def call(weights: Any, others: Any) -> Any:
        arguments = list(others[0])
        for i, given in zip(places, weights, strict=True):
            arguments[i] = given
        return function(*arguments, **others[1])

    others = [None if i in places else arg for i, arg in enumerate(args)]
    return call, [args[i] for i in places], (others, kwargs)


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


def _init(plan: Plan) -> FunctionState:
    """Return the state before the first step."""
    stateful = {name: each for name, each in plan.by_name.items() if each.has_state}
    return FunctionState({name: each.init_overwritten() for name, each in stateful.items()})


def _argument(function: Callable[..., Any], position: int) -> str:
    try:
        return list(inspect.signature(function).parameters)[position]
    except (ValueError, TypeError, IndexError):
        return f"weights_{position}"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
