"""Find products of modules that multiply by their parameters themselves: einsum, dot, matmul, @.

All of these are ``dot_general`` in the end. While a method of such a module runs, a `Follower` gets
each operation of JAX, and recognises a parameter of the module, also cast, transposed, reshaped,
sliced, or joined with others, by its identity. Nothing is patched, and the values are JAX's own.

The bodies of ``jax.checkpoint``, ``jax.lax.scan`` and the like are followed by a `Walk`, as they
are in a function. A function with a derivative of its own is not entered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jfp8.conversion import edges
from jfp8.conversion.legacy_matmul import Place, Source, WeightMatmul, weight_second
from jfp8.conversion.legacy_walk import JOINED, SAME, Walk, is_entered
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.operation import Options, State
from jfp8.products.slower import why_slower
from jfp8.tracing.compat import interposed, interposing
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import layer_noted, note


@dataclass(frozen=True)
class Parameter:
    """Say where a parameter is."""

    module: Any
    place: str  # the path of the module, "Block_0/attn"
    name: str

    @property
    def path(self) -> str:
        """Return ``"Block_0/attn/w"``."""
        return f"{self.place}/{self.name}".lstrip("/")


@dataclass(frozen=True)
class ParameterProduct:
    """Hold a ``dot_general`` of `x` and `weight`, which is a parameter or was made of one."""

    parameter: Parameter
    nth: int  # 1, or more for those that sum over other dimensions of the weight than the first did
    x: jax.Array
    weight: jax.Array
    swapped: bool  # the weight is the first operand
    bind: Callable[..., jax.Array]  # of both operands in their order
    params: Mapping[str, Any]  # of the primitive
    loops: tuple[int, ...] = ()  # lengths of the scans that slice the parameter, outermost first

    @property
    def name(self) -> str:
        """Return ``"Block_0/attn/w"``, or ``"Block_0/attn/w_2"`` of the second such product."""
        return self.parameter.path + (f"_{self.nth}" if self.nth > 1 else "")

    def plain(self) -> jax.Array:
        """Compute the product as the module does by itself."""
        operands = (self.weight, self.x) if self.swapped else (self.x, self.weight)
        return self.bind(*operands, **self.params)

    def abstract(self) -> ParameterProduct:
        """Return it with shapes in place of the operands."""
        shape_of: Any = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        return replace(self, x=shape_of(self.x), weight=shape_of(self.weight))

    def staying(self, reason: str) -> jax.Array:
        """Compute `plain`, with the reason for that in reports; "": it is not this model's."""
        with self._noted(reason) if reason else contextlib.nullcontext():
            return self.plain()

    def in_fp8(self, options: Options, state: State, gpu: Gpu | None) -> jax.Array:
        """Compute the product in a body; as it is where FP8 is expected to be slower on `gpu`."""
        recipe = options.recipe
        if gpu is not None and (slower := why_slower(gpu, recipe, self.plain, self.x, self.weight)):
            return self.staying(slower)

        def dot_general(x: Any, w: Any, numbers: Any, _: Any, dtype: Any) -> jax.Array:
            how = {"preferred_element_type": dtype}
            return observed_dot_general(x, w, numbers, options, state, **how)[0]

        has_histories = state.histories is not None
        lacks = not has_histories and recipe.init_state() is not None
        causal = recipe.is_causal("dense", history=has_histories)
        ahead = note("ahead", "" if causal else "later positions")
        named = note("recipe", f"{recipe.name}, no histories" if lacks else recipe.name)
        with self._noted(""), named, ahead:
            return self.by(dot_general)

    def _noted(self, reason: str) -> AbstractContextManager[None]:
        return layer_noted(self.parameter.place, type(self.parameter.module).__name__, reason)

    def by(self, dot_general: Callable[..., jax.Array]) -> jax.Array:
        """Compute the product by `dot_general`, whose second operand is the weight."""
        how = self.params["precision"], self.params["preferred_element_type"]
        run = lambda x, weight, numbers: dot_general(x, weight, numbers, *how)
        return weight_second(
            run, self.x, self.weight, self.params["dimension_numbers"], self.swapped
        )


@dataclass(frozen=True)
class Prepared:
    """Say how a product in the body of a loop or a checkpoint is computed."""

    compute: Callable[[ParameterProduct, Any], jax.Array]  # of a product and its state
    state: Any = ()
    stacked: bool = True  # the state has axes as `ParameterProduct.loops`, and a turn gets a part

    @classmethod
    def staying(cls, reason: str) -> Prepared:
        """Compute the product as the module does, with the reason for that in reports."""
        return cls(lambda product, _: product.staying(reason))


@dataclass(frozen=True)
class Follower:
    """Follow the parameters of modules through every operation under `interposed`."""

    modules: Sequence[Any]
    parameter_of: Callable[[Any], Parameter | None]  # that an array is, if it is one of `modules`
    found: Callable[[ParameterProduct], jax.Array]  # computes a product of a parameter
    prepare: Callable[[ParameterProduct], Prepared]  # the same in a body; its operands are shapes
    enters: Callable[[Any], bool]  # whether to follow into a ``jit`` that is given these values
    # Values made of a parameter, by identity; kept, so that no other value gets that.
    known: dict[int, tuple[Any, Parameter]] = field(default_factory=dict)
    # By the path of a parameter, what tells its products apart, in the order of the program.
    sums: dict[str, list[Any]] = field(default_factory=dict)

    def __call__(self, primitive: Any, values: Any, params: Mapping[str, Any]) -> Any:
        sources = [self.source(value) for value in values]
        if primitive.name == "dot_general":
            return self.product(primitive, values, params, sources)
        if primitive.name in ("jit", "pjit"):
            body = params["jaxpr"]
            constants = map(self.source, getattr(body, "consts", ()))
            if (any(sources) or any(constants)) and self.enters(values):
                with interposed(self):  # what is inside passes by here
                    return jaxpr_as_fun(body)(*values)
        elif any(sources) and is_entered(primitive):
            return self.inside(primitive, values, params, sources)
        result = primitive.bind(*values, **params)
        self.moved(primitive, values, sources, result)
        return result

    def moved(self, primitive: Any, values: Any, sources: Any, result: Any) -> None:
        """Note what a result is that has the same numbers as a parameter, or some of them."""
        parts: Any = sources if primitive.name == "concatenate" else sources[:1]  # no indices
        if parts and None not in parts and primitive.name in SAME | JOINED:
            for value in result if primitive.multiple_results else [result]:
                # One that is repeated is an activation, such as queries that are learned.
                if np.size(value) <= np.size(values[0]) or primitive.name in JOINED:
                    self.known[id(value)] = (value, parts[0])

    def product(self, primitive: Any, values: Any, params: Any, sources: Any) -> jax.Array:
        """Compute ``dot_general`` of the `values`, which are made of the parameters `sources`."""
        first, second = sources
        dtypes = [jax.numpy.result_type(value) for value in values]
        wide = [dtype.itemsize in (2, 4) for dtype in dtypes]
        ordinary = all(wide) and all(jax.numpy.issubdtype(t, jax.numpy.floating) for t in dtypes)
        if (first is None) == (second is None) or not ordinary or params.get("out_sharding"):
            return primitive.bind(*values, **params)
        swapped = first is not None
        x, weight = values[::-1] if swapped else values
        operands = x, weight, swapped, primitive.bind, params
        return self.found(self.numbered(ParameterProduct(first or second, 1, *operands)))

    def numbered(self, product: ParameterProduct) -> ParameterProduct:
        """Return `product` with a number that it shares with all that sum in the same way."""
        seen = self.sums.setdefault(product.parameter.path, [])
        dimensions = product.params["dimension_numbers"][0][0 if product.swapped else 1]
        sums = np.shape(product.weight), dimensions, product.loops
        if sums not in seen:
            seen.append(sums)
        return replace(product, nth=seen.index(sums) + 1)

    def inside(self, primitive: Any, values: Any, params: Any, sources: Any) -> Any:
        """Compute a loop, a checkpoint or the like, whose body may have products of parameters."""
        closed = jax.make_jaxpr(lambda *xs: primitive.bind(*xs, **params))(*values)
        given = [source and Source(source.path) for source in sources]
        parameters = {source.path: source for source in filter(None, sources)}
        of_source = lambda source: parameters[source.path.split("+")[0]]
        met: dict[str, ParameterProduct] = {}
        loops: dict[str, list[Place]] = {}

        def product_of(matmul: WeightMatmul) -> ParameterProduct | None:
            eqn = matmul.eqn
            if eqn.primitive.name != "dot_general" or eqn.params.get("out_sharding"):
                return None
            operands = matmul.x, matmul.weight, matmul.swapped, eqn.primitive.bind, eqn.params
            lengths = tuple(length for _, length in matmul.source.loops)
            product = ParameterProduct(of_source(matmul.source), 1, *operands, lengths)
            return self.numbered(product)

        def see(matmul: WeightMatmul) -> jax.Array:
            if (product := product_of(matmul)) is not None:
                met[product.name] = product.abstract()
                loops[product.name] = [place for place, _ in matmul.source.loops]
            return matmul.plain()

        def compute(matmul: WeightMatmul) -> jax.Array:
            if (product := product_of(matmul)) is None:
                return matmul.plain()
            return prepared[product.name].compute(product, matmul.states[product.name])

        walk = lambda compute, states: (
            lambda *xs: Walk(compute, loops).run(closed.jaxpr, closed.consts, xs, given, states)
        )
        jax.eval_shape(lambda *xs: walk(see, {})(*xs)[0], *values)
        prepared = {name: self.prepare(product) for name, product in met.items()}
        loops |= {name: [] for name, how in prepared.items() if not how.stacked}
        states = {name: how.state for name, how in prepared.items()}
        results, made = walk(compute, states)(*values)
        for value, source in zip(results, made, strict=True):
            if source is not None:
                self.known[id(value)] = value, of_source(source)
        return results if primitive.multiple_results else results[0]

    def derived(self, values: Any, results: Any) -> None:
        """Follow through a custom derivative that makes numbers of bytes (dequantize)."""
        found = self.source(values[0]) if values else None
        narrow = found is not None and jax.numpy.result_type(values[0]).itemsize == 1
        if narrow and [np.shape(x) for x in results] == [np.shape(values[0])]:
            self.known[id(results[0])] = (results[0], found)

    def source(self, value: Any) -> Parameter | None:
        """Return the parameter that `value` is made of."""
        if np.ndim(value) < 2:
            return None
        if id(value) in self.known:
            return self.known[id(value)][1]
        return self.parameter_of(value)


def followed_modules() -> tuple[Any, ...]:
    """Return the modules whose parameters are followed here."""
    outer = interposing()
    return tuple(outer.modules) if isinstance(outer, Follower) else ()


def following(
    modules: Sequence[Any],
    parameter_of: Callable[[Any], Parameter | None],
    found: Callable[[ParameterProduct], jax.Array],
    prepare: Callable[[ParameterProduct], Prepared],
    enters: Callable[[Any], bool] = lambda values: True,
) -> AbstractContextManager[None]:
    """Follow parameters in this context; for the arguments see `Follower`."""
    outer = interposing()
    log: Any = (outer.known, outer.sums) if isinstance(outer, Follower) else ()
    return interposed(Follower(modules, parameter_of, found, prepare, enters, *log))


def mark_inside(_: ParameterProduct) -> Prepared:
    """Mark both ends of a product in a body, while a model is looked at."""
    return Prepared(lambda inside, _: edges.mark_product(inside))
