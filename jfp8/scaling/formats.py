"""Number formats, described as data: `Format`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """A floating-point format as data.

    ``value = (-1)^s * 2^(e - bias) * 1.m`` for ``e >= 1`` and ``(-1)^s * 2^(1 - bias) * 0.m`` for
    ``e == 0``, with `exponent_bits` bits of ``e`` and `mantissa_bits` bits of ``m``.

    Attributes:
      name: its name in the literature.
      dtype: the numpy/ml_dtypes dtype that stores it; ``uint8`` for E3M4, which has none.
      exponent_bits: width of the exponent field.
      mantissa_bits: width of the mantissa field, without the hidden bit.
      bias: exponent bias.
      max: largest finite value.
      max_code: the bit pattern of `max`.
      nan_code: the bit pattern that NaN becomes. E2M1 has no NaN: there it is -0, as in ml_dtypes.
      has_nan: whether `nan_code` is a NaN.
      signed: whether there is a sign bit, and with it a zero and subnormals.

    References:
      OCP OFP8, Table 1; OCP Microscaling Formats v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0);
      Intel FP8 Emulation Toolkit, README (E3M4).
    """

    name: str
    dtype: np.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    nan_code: int
    has_nan: bool = True
    signed: bool = True

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return (1 if self.signed else 0) - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value, floor(log2(max))."""
        return int(np.frexp(self.max)[1]) - 1

    @property
    def smallest_normal(self) -> float:
        """2^min_exponent."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value: a subnormal, or for E8M0 the smallest normal one."""
        return 2.0 ** (self.min_exponent - (self.mantissa_bits if self.signed else 0))

    def __repr__(self) -> str:
        return f"Format({self.name})"


E4M3FN = Format("E4M3FN", np.dtype(ml_dtypes.float8_e4m3fn), 4, 3, 7, 448.0, 0x7E, 0x7F)
E5M2 = Format("E5M2", np.dtype(ml_dtypes.float8_e5m2), 5, 2, 15, 57344.0, 0x7B, 0x7F)
# Follows the conventions of E4M3FN. ml_dtypes' float8_e3m4 is another format (max 15.5, with Inf).
E3M4 = Format("E3M4", np.dtype(np.uint8), 3, 4, 3, 30.0, 0x7E, 0x7F)
E2M1FN = Format("E2M1FN", np.dtype(ml_dtypes.float4_e2m1fn), 2, 1, 1, 6.0, 0x7, 0x8, has_nan=False)
E8M0FNU = Format(
    "E8M0FNU", np.dtype(ml_dtypes.float8_e8m0fnu), 8, 0, 127, 2.0**127, 254, 255, signed=False
)
FORMATS = (E4M3FN, E5M2, E3M4, E2M1FN, E8M0FNU)


@functools.cache
def format_of(dtype: np.dtype) -> Format:
    """Return the `Format` stored by `dtype`; raises ``TypeError`` for any other dtype."""
    for fmt in FORMATS:
        if fmt.dtype == dtype:
            return fmt
    stored = ", ".join(f"{fmt.dtype} ({fmt.name})" for fmt in FORMATS)
    raise TypeError(
        f"{np.dtype(dtype)} stores none of jfp8's formats. Formats: {stored}. NumPy's files forget "
        "these dtypes: after np.load, pass data.view(jnp.float8_e4m3fn)."
    )


def format_called(name: str | None) -> Format:
    """Return the `Format` of that name; raises ``ValueError`` if there is none."""
    for fmt in FORMATS:
        if fmt.name == name:
            return fmt
    names = ", ".join(fmt.name for fmt in FORMATS)
    raise ValueError(f"There is no format called {name!r}. Formats: {names}.")


FormatLike = Format | str | jax.typing.DTypeLike
"""What names a format: a `Format`, ``"e4m3fn"`` or ``"e4m3"``, ``jnp.float8_e4m3fn``."""


def as_format(given: FormatLike, name: str = "fmt", known: Sequence[Format] = FORMATS) -> Format:
    """Return the `Format` that `given` stands for; errors call the argument `name`.

    ``uint8`` stands for no format. ``float8_e4m3`` and ``float8_e3m4`` of ml_dtypes have an Inf,
    and are not the formats ``"e4m3"`` and ``"e3m4"``.

    >>> from jfp8.scaling.formats import as_format
    >>> as_format("e4m3"), as_format(np.dtype("float8_e5m2"))
    (Format(E4M3FN), Format(E5M2))
    """
    if isinstance(given, Format):
        return given
    names = ", ".join(f"jfp8.{fmt.name}" if fmt in FORMATS else fmt.name for fmt in known)
    allowed = f'one of {names}, its name such as "e4m3fn", or its dtype such as jnp.float8_e4m3fn'
    if isinstance(given, str):
        short = given.lower()
        for fmt in known:
            full = fmt.name.lower()  # "e4m3fn"; a dtype is called "float8_e4m3fn"
            if short in (full, full[:4]) or (short == fmt.dtype.name != "uint8"):
                return fmt
        raise ValueError(f"{name}={given!r}: there is no such format. It must be {allowed}.")
    try:
        dtype = np.dtype(given)  # pyrefly: ignore
    except (TypeError, ValueError):
        dtype = None
    for fmt in known:
        if dtype is not None and dtype != np.uint8 and fmt.dtype == dtype:
            return fmt
    raise TypeError(f"{name} must be a jfp8.Format, {allowed}; got {given!r}.")
