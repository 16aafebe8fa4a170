"""The few places where JAX versions differ; the only file that may use internals of JAX or Flax."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import api_util, config, source_info_util
from jax._src import mesh as mesh_lib
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return `closed` without the equations that its results do not need."""
    jaxpr, _ = partial_eval.dce_jaxpr(
        closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
    )
    return ClosedJaxpr(jaxpr, closed.consts)


def varying_axes(x: jax.Array) -> frozenset[Any]:
    """Mesh axes of an enclosing ``shard_map`` over which `x` differs from device to device."""
    aval: Any = jax.typeof(x)
    aval = getattr(aval, "mat", aval)  # JAX 0.12 moved the attribute
    axes = getattr(aval, "varying", None)
    return frozenset(getattr(aval, "vma", frozenset()) if axes is None else axes)


def same_varying_axes(tree: Any) -> Any:
    """Return `tree` with every leaf made to vary over the union of all leaves' mesh axes.

    ``shard_map`` requires the cotangents of a ``custom_vjp`` to vary like their primals. Casting
    the primals first makes JAX sum the cotangents of replicated ones over the mesh, as it should.
    """
    leaves = jax.tree.leaves(tree)
    union: frozenset[Any] = frozenset().union(*(varying_axes(leaf) for leaf in leaves))
    return jax.tree.map(lambda leaf: _varying_over(union, leaf), tree)


def _varying_over(axes: frozenset[Any], x: jax.Array) -> jax.Array:
    missing = tuple(axes - varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def of_varying(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel` for an enclosing ``shard_map``: results vary over the axes of operands.

    Pallas kernels for TPUs would have to say it of each result, in a spelling of one JAX version.
    """

    @functools.wraps(kernel)
    def call(*operands: Any, **how: Any) -> Any:
        arrays = [x for x in jax.tree.leaves((operands, how)) if isinstance(x, jax.Array)]
        if not any(map(varying_axes, arrays)):
            return kernel(*operands, **how)
        with config._check_vma(False):
            found = kernel(*operands, **how)
        return same_varying_axes((found, arrays))[0]

    return call


def axes_apart(x: jax.Array, other: jax.Array) -> tuple[Any, ...]:
    """Return the axes of an enclosing ``shard_map`` or ``pmap`` over which `x` varies, not `other`.

    All of them where JAX does not track that (``check_vma=False``).
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual or not config._check_vma.value:
        return tuple(manual)
    apart = varying_axes(x) - varying_axes(other)
    return tuple(axis for axis in manual if axis in apart)


def vary_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return `x` made to vary over all mesh axes over which `other` does."""
    return _varying_over(varying_axes(other), x)


def mesh_in_effect() -> Mesh | AbstractMesh | None:
    """Return the mesh of ``jax.set_mesh``, or of ``with mesh:``, which JAX deprecates."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    physical = mesh_lib.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def finest_mesh(mesh: Mesh, sharding: Any) -> Mesh:
    """Return the devices of `mesh`, or of a sharding if that is empty, with axes of prime sizes.

    The compiler may divide a dimension by a part of an axis, which has a name here.
    """
    devices = np.array(sharding._device_assignment) if mesh.empty else mesh.devices
    names = ("devices",) if mesh.empty else mesh.axis_names
    axes = [
        (f"{name}:{i}", prime)
        for name, size in zip(names, devices.shape, strict=True)
        for i, prime in enumerate(_prime_factors(size))
    ]
    return Mesh(devices.reshape([size for _, size in axes]), [name for name, _ in axes])


def _prime_factors(n: int) -> list[int]:
    for prime in range(2, n + 1):
        if n % prime == 0:
            return [prime, *_prime_factors(n // prime)]
    return []


def axes_by_dimension(x: Any, mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the axes of `mesh` over which the compiler shards each dimension of an array.

    Empty for all, if sharding is undecided, or cannot be expressed by axes.
    """
    none: list[tuple[str, ...]] = [()] * len(x.shape)
    if x.sharding is None:
        return none
    try:
        (spec,) = parse_flatten_op_sharding(x.sharding._to_xla_hlo_sharding(len(x.shape)), mesh)
    except (ValueError, NotImplementedError, AssertionError):
        return none
    named = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in spec]
    return [*named, *none[len(named) :]]


def evaluate(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of one equation of a jaxpr, in its own context, scopes and lines."""
    eager = eqn.primitive.get_bind_params(eqn.params)
    with scope_of(eqn):
        results = eqn.primitive.bind(*values, **eager)
    return list(results) if eqn.primitive.multiple_results else [results]


@contextlib.contextmanager
def scope_of(eqn: Any) -> Iterator[None]:
    """Return the context of an equation: its mesh, its named scopes and the user's lines."""
    source = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bodies_of(eqn: Any) -> list[tuple[Jaxpr, Sequence[Any]]]:
    """List the jaxprs among the parameters of an equation, bodies and branches, with constants.

    A primitive that is an object (since 0.11) may have none: then its only body is its expansion.
    """
    held = eqn.params.get("_prim")
    found = list(_jaxprs_among((eqn.params if held is None else held.params).values()))
    if held is None or found or primitive_name(eqn) == "name":
        return found
    return list(_jaxprs_among([_expansion(held)]))


def _jaxprs_among(parameters: Iterable[Any]) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    for value in parameters:
        for x in value if isinstance(value, (tuple, list)) else (value,):
            # A function with its own derivative is in another object since 0.11.
            closed = x if isinstance(x, ClosedJaxpr) else getattr(x, "jaxpr", None)
            if isinstance(closed, ClosedJaxpr):
                yield closed.jaxpr, closed.consts
            elif isinstance(x, Jaxpr):
                yield x, ()


@functools.lru_cache(maxsize=64)
def _expansion(held: Any) -> ClosedJaxpr:
    """Return the program that a primitive stands for where it is not differentiated."""
    return jax.make_jaxpr(held.expand)(*held.in_avals)


def jaxprs_of(eqn: Any) -> Iterator[Jaxpr]:
    """List the jaxprs among the parameters of an equation: bodies, branches."""
    return (jaxpr for jaxpr, _ in bodies_of(eqn))


def body_of(eqn: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Return the only body of an equation, such as ``scan`` or ``jit``, and its constants."""
    (body,) = bodies_of(eqn)
    return body


_ONE_NAME = {
    "remat2": "checkpoint",
    "RematTraced": "checkpoint",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
}


def primitive_name(eqn: Any) -> str:
    """Return the name of a primitive, the same for all versions of it in JAX."""
    held = eqn.params.get("_prim")  # primitives that are objects, since 0.11
    name = eqn.primitive.name if held is None else type(held).__name__
    return _ONE_NAME.get(name, name)


def rules_in_checkpoints() -> AbstractContextManager[object]:
    """Return a context for calls whose forward rules shall run inside ``jax_remat3``.

    JAX would run the plain function there, and policies would not find names in the rule.
    """
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(
            f"jfp8 takes jax_remat3 from JAX 0.12 on, and this is {jax.__version__}, in which "
            "layers inside jax.checkpoint would record no amaxes. Upgrade JAX, or leave the "
            "option off: jax.config.update('jax_remat3', False)."
        )
    return config.custom_vjp3(True)


def policy_of(eqn: Any) -> Any:
    """Return the policy of an equation that is a ``checkpoint``, or None."""
    held = eqn.params.get("_prim")
    return (eqn.params if held is None else held.params).get("policy")


def evaluate_with_body(
    eqn: Any, body: Callable[..., Any], policy: Callable[..., Any] | None, *arguments: Any
) -> Any:
    """Return ``body(*arguments)``, computed as an equation that is a ``checkpoint`` does."""
    leaves, structure = jax.tree.flatten(arguments)
    flat = lambda *leaves: body(*jax.tree.unflatten(structure, leaves))
    closed, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    jaxpr, values = convert_constvars_jaxpr(closed.jaxpr), [*closed.consts, *leaves]
    held = eqn.params.get("_prim")
    if held is None:
        params = {**eqn.params, "jaxpr": jaxpr, "policy": policy}
    else:
        options = {name: value for name, value in held.params.items() if name != "jaxpr"}
        if isinstance(options.get("prevent_cse"), tuple):  # one for each argument
            options["prevent_cse"] = any(options["prevent_cse"])
        params = {"_prim": type(held)(ClosedJaxpr(jaxpr, ()), **options | {"policy": policy})}
    return jax.tree.unflatten(jax.tree.structure(out), evaluate(eqn.replace(params=params), values))


def called(eqns: Sequence[Any]) -> Any:
    """Return one ``closed_call`` of equations, of which others read the last one's results."""
    last, made = eqns[-1], {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
    into, out = [v for v in read if v not in made], [v for v in last.outvars if type(v) is Var]
    names = api_util.debug_info("group", lambda *x: x, into, {})
    body = ClosedJaxpr(Jaxpr((), into, out, eqns, debug_info=names.with_unknown_names()), ())
    source = last.source_info.replace(name_stack=source_info_util.NameStack())
    how = {"primitive": closed_call_p, "params": {"call_jaxpr": body}, "source_info": source}
    return last.replace(invars=into, outvars=out, **how)


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """The number of operands of a ``scan`` that are constants, and of those that are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.12
    return len(consts), len(carry)


def manual_axes(eqn: Any) -> frozenset[Any]:
    """The axes of the mesh that a ``shard_map`` divides its operands by."""
    names = ("newly_manual_axes", "manual_axes")  # JAX 0.10 has the first
    return next(frozenset(eqn.params[name]) for name in names if name in eqn.params)


def kernels_are_interpreted() -> bool:
    """Return whether Pallas kernels are interpreted, as by `force_gpu_interpret_mode`."""
    context = getattr(config, "pallas_tpu_interpret_mode_context_manager", None)
    return context is not None and context.value is not None


def cudnn_version() -> int | None:
    """Return the version of cuDNN, such as 91500 for 9.15.0; None if it is not installed."""
    from jax._src.lib import cuda_versions

    try:
        return None if cuda_versions is None else int(cuda_versions.cudnn_get_version())
    except RuntimeError:
        return None
