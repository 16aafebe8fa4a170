"""`backends`: a context that says which backends may compute what jfp8 quantizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax

BACKENDS = ("emulate", "bf16", "xla", "cudnn", "mosaic_gpu", "mosaic_tpu")

# Allowed implementations, a frozenset; None allows all.
ALLOWED = jax.make_user_context(None)


def backends(*names: str, without: str | Sequence[str] = ()) -> AbstractContextManager[object]:
    """Return a context in which only some backends compute what jfp8 quantizes.

    It holds for programs that are traced inside: layers, converted models, attention, experts and
    functions alike. For example, to find out whether a kernel is at fault::

        with jfp8.backends("bf16"):  # or jfp8.backends(without="mosaic_gpu")
            loss, grads = step(state, batch)

    Results differ by floating-point summation order; recipes that round stochastically may draw
    other bits for experts.

    Args:
      *names: the backends that are allowed; none: all. ``"emulate"``: the reference, in f32, on any
        device. ``"bf16"``: stored values in bf16 matmuls, which is exact. ``"xla"``: FP8 matmuls of
        XLA (cuBLASLt on NVIDIA GPUs). ``"cudnn"``: block-scaled matmuls of cuDNN on Blackwell.
        ``"mosaic_gpu"``, ``"mosaic_tpu"``: Pallas kernels of jfp8, also those that quantize.
      without: backends to leave out of `names`.

    Returns:
      A context. What no allowed backend computes raises ``NotImplementedError`` where it is traced.

    Raises:
      ValueError: an unknown name, or no backend is left.

    >>> import jax.numpy as jnp, jfp8
    >>> layer = jfp8.Dense(4)
    >>> with jfp8.backends(without=("mosaic_gpu", "cudnn")):
    ...     y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((2, 3)))
    >>> y.shape
    (2, 4)
    """
    left_out = (without,) if isinstance(without, str) else tuple(without)
    if unknown := [name for name in (*names, *left_out) if name not in BACKENDS]:
        raise ValueError(f"backends: {unknown[0]!r} is unknown. Allowed: {', '.join(BACKENDS)}.")
    allowed = frozenset(names or BACKENDS) - frozenset(left_out)
    if not allowed:
        raise ValueError(
            f"backends({', '.join(map(repr, names))}, without={without!r}) leaves no backend. "
            "Allow 'bf16' or 'emulate', which compute everything."
        )
    return ALLOWED(allowed)


def why_left_out(name: str) -> str | None:
    """Return why the backend must not compute anything here; None if it may."""
    allowed = ALLOWED.value
    if allowed is None or name in allowed:
        return None
    return f"jfp8.backends(...) allows {', '.join(n for n in BACKENDS if n in allowed)} alone"


def first_allowed(what: str, *names: str) -> str:
    """Return the first of these backends for `what` that may compute it, or raise."""
    reasons = {name: why_left_out(name) for name in names}
    for name, reason in reasons.items():
        if reason is None:
            return name
    raise NotImplementedError(
        f"No allowed backend computes {what}: {reasons[names[-1]]}. Allow 'bf16' or "
        "'emulate' as well, or leave the layer in high precision: jfp8.convert(model, exempt='its "
        "path')."
    )
