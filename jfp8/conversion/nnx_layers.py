"""The layers of an NNX model, their weights, and the matmuls' state that a conversion adds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jfp8.conversion.product_rows import INSIDE_OF_ATTENTION, INSIDE_OF_OURS, NO_LAYER
from jfp8.conversion.selection import Selection
from jfp8.conversion.unconverted_warning import is_known
from jfp8.layers.nnx.attention import MultiHeadAttention, has_stock_attention
from jfp8.layers.nnx.hooks import hook_of
from jfp8.layers.nnx.products import Product
from jfp8.layers.nnx.transformer import LayerNormAttention
from jfp8.scaling.printing import natural

Keys = tuple[Any, ...]


@dataclass(frozen=True)
class Weight:
    """A parameter of a module in a converted model.

    Attributes:
      keys: where it is in the module.
      path: by which a user selects its matmuls: of the layer, or of a user's own parameter.
      selection: decides on its matmuls.
      holder: the module's attribute that may hold their state; "" if they keep none.
      stays: why its matmuls stay as they are, whatever is selected.
    """

    keys: Keys
    path: str
    selection: Selection
    holder: str = ""
    stays: str = ""

    def of(self, module: Any) -> Any:
        """Return the parameter in `module`."""
        for key in self.keys:
            by_name = isinstance(key, str) and not isinstance(module, Mapping)
            module = getattr(module, key) if by_name else module[key]
        return module

    def product(self, module: Any) -> Product | None:
        """Return what holds the state of its matmuls in `module`, if anything does."""
        held = getattr(module, self.holder, None) if self.holder else None
        return held if isinstance(held, Product) else None


@dataclass(frozen=True)
class Converted:
    """Hold what a module in a converted model knows; see `converted_of`.

    Attributes:
      path: the module's, in the model.
      weights: its parameters.
      is_plain: its methods run as in the plain model: it is in the copy that a call traces.
      reason: why its matmuls that have no weight stay as they are, for reports.
    """

    path: str
    weights: tuple[Weight, ...] = ()
    is_plain: bool = False
    reason: str = ""


# Flax's prints of a model leave out static attributes with an underscore.
_ATTRIBUTE = "_jfp8_converted"


def converted_of(module: Any) -> Converted | None:
    """Return what a module knows of its conversion; None if it is not converted."""
    return vars(module).get(_ATTRIBUTE) if isinstance(module, nnx.Module) else None


def place_of(module: Any) -> str:
    """Return the path of a module in the converted model that it is part of, else ""."""
    converted = converted_of(module)
    return "" if converted is None else converted.path


def set_converted(module: Any, converted: Converted | None) -> None:
    """Tell a module of its conversion; Flax raises if the module is of another trace."""
    setattr(module, _ATTRIBUTE, converted)


def graph_of(tree: Any) -> tuple[list[nnx.Module], list[nnx.Variable]]:
    """List the modules and the Variables in `tree`, shared ones once."""
    modules: list[nnx.Module] = []
    variables: list[nnx.Variable] = []
    for _, x in nnx.iter_graph(tree, graph=True):
        if isinstance(x, nnx.Module):
            modules.append(x)
        elif isinstance(x, nnx.Variable):
            variables.append(x)
    return modules, variables


def nodes_of(module: nnx.Module) -> list[tuple[Keys, Any]]:
    """List the modules in `module` and their keys, outer ones first, in the order of names."""
    found = [(keys, x) for keys, x in nnx.iter_graph(module, graph=True) if _is_module(x)]
    return sorted(found, key=lambda item: list(map(natural, item[0])))


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Module) and not isinstance(x, (nnx.List, nnx.Dict, Product))


def spelled(keys: Keys) -> str:
    """Return ``"layers/0/linear1"``."""
    return "/".join(map(str, keys))


def params_of(module: nnx.Module) -> list[tuple[Keys, nnx.Param]]:
    """List the parameters that a module holds itself, or in containers."""
    found = list(nnx.iter_graph(module, graph=True))
    inner = {keys for keys, x in found if keys and _is_module(x)}
    own = lambda keys: not any(keys[:n] in inner for n in range(1, len(keys)))
    return [(keys, x) for keys, x in found if isinstance(x, nnx.Param) and own(keys)]


def weights_of(module: Any, place: str, selection: Selection) -> list[Weight]:
    """List the parameters of a module, and the attributes that may hold the state of a matmul."""
    if has_own_product(module):
        return []
    hook, why = hook_of(module), why_not(module)
    known = is_known(type(module)) or hook is not None
    found = []
    for keys, _ in params_of(module):
        path = f"{place}/{spelled(keys)}".lstrip("/")
        holder = "" if known else "DotGeneral_" + "_".join(map(str, keys))
        if hook is not None and keys == ("kernel",):
            path, holder = place, "" if why else hook.name
        found.append(Weight(keys, path, selection, holder, why))
    return found


def why_not(module: Any) -> str:
    """Return why the matmuls of a module cannot be converted; "" if they can."""
    hook = hook_of(module)
    if hook is None:
        return NO_LAYER if is_known(type(module)) else ""
    return "" if hook.is_stock_in(module) else f"the layer was given its own {hook.name}"


def has_own_product(module: Any) -> bool:
    """Return whether a module was given a product of jfp8, which conversion leaves alone."""
    hook = hook_of(module)
    given = None if hook is None else getattr(module, hook.name, None)
    return isinstance(given, Product) or type(module).__module__.startswith("jfp8.")


def inside_of_attention(module: Any) -> str:
    """Return why attention between the projections of a module is not FP8; "" if it has none."""
    if isinstance(module, LayerNormAttention):
        return INSIDE_OF_OURS
    if not isinstance(module, nnx.MultiHeadAttention):
        return ""
    if not has_stock_attention(module):
        return "the layer was given its own attention_fn"
    return INSIDE_OF_OURS if isinstance(module, MultiHeadAttention) else INSIDE_OF_ATTENTION


def stacks_of(nodes: Sequence[tuple[Keys, Any]]) -> dict[Keys, tuple[int, ...]]:
    """Find the axes along which modules are stacked, from Flax's layers next to them.

    All parameters in a stack begin with these axes, and its layers do not declare them.
    """
    around = lambda keys: [keys[:n] for n in range(len(keys), -1, -1)]
    starts: dict[Keys, list[Any]] = {p: [] for k, x in nodes if hook_of(x) for p in around(k)}
    for keys, module in nodes:
        hook = hook_of(module)
        values = [variable.get_raw_value() for _, variable in params_of(module)]
        shapes = [value.shape for value in values if hasattr(value, "shape")]
        for place in starts.keys() & set(around(keys)):
            starts[place] += [*shapes, hook.stacked_axes(module)] if hook else shapes
    found = {place: os.path.commonprefix(shapes) for place, shapes in starts.items()}
    return {keys: next((found[p] for p in around(keys) if p in found), ()) for keys, _ in nodes}


@contextlib.contextmanager
def as_plain(modules: Sequence[nnx.Module]) -> Iterator[None]:
    """Return a context in which `modules` are plain: without state, and not converted."""
    converted = [(x, how) for x in modules if (how := converted_of(x)) is not None]
    of_weights = [(x, w, w.product(x)) for x, c in converted for w in c.weights]
    held = [(x, w, product) for x, w, product in of_weights if product is not None]
    for module, weight, _ in held:
        hook = hook_of(module)
        if hook is None:
            delattr(module, weight.holder)
        else:
            setattr(module, weight.holder, nnx.static(hook.stock[-1]))
    for module, how in converted:
        object.__setattr__(module, _ATTRIBUTE, replace(how, is_plain=True))
    yield
    for module, how in converted:
        object.__setattr__(module, _ATTRIBUTE, how)
    for module, weight, product in held:
        setattr(module, weight.holder, nnx.data(product))
