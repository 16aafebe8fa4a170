"""Every kernel that a planner may choose, with a small case of each: the table of ``check``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.command_line.exactness import Record, as_f32, awkward, normal, on_cpu, powers_of_two, run
from jfp8.command_line.product_checks import (
    check_block_matmul,
    check_grouped_matmul,
    check_grouped_outer,
    check_matmul,
    check_product,
)
from jfp8.command_line.quantize_checks import (
    check_quantize_heads,
    check_quantize_lines,
    check_quantize_rows_in_blocks,
    check_quantize_tensor,
    check_quantize_tiles,
    check_row_and_column_amax,
    check_tensor_amax,
)
from jfp8.kernels.blackwell.backend import MX, NVFP4, Kind, scaled_matmul
from jfp8.matmul.scaled_matmul import scaled_matmul as by_implementation
from jfp8.products.flash.dot_product import scaled_dot_product_attention
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E4M3FN, E5M2

ATTENTION_ERROR = 0.5  # of FP8's own: sums in another order round some of P to the next code
Capability = tuple[int, int]


class Case(NamedTuple):
    """Hold a line of the table.

    `by` is ``"pallas"``, which JAX before 0.11.2 cannot import and a CPU interprets; ``"tcgen05"``,
    Pallas that no CPU interprets; ``"xla"``, on any device; or ``"cudnn"``, on GPUs only.
    """

    kernel: str
    task: str  # of a planner, which leaves the kernels for it out if this one is wrong
    gpus: tuple[Capability, Capability]  # that have it: from the first, below the second
    by: str
    check: Callable[..., object]  # raises if the kernel is wrong
    arguments: tuple[Any, ...]

    def is_for(self, capability: Capability | None) -> bool:
        """Return whether a GPU of this capability, or a CPU for None, can try the kernel."""
        if self.by in ("pallas", "tcgen05") and jax.__version_info__ < (0, 11, 2):
            return False
        if capability is None:
            return self.by in ("pallas", "xla")
        return self.gpus[0] <= capability < self.gpus[1]


def check_cublaslt() -> Record:
    """Check an FP8 matmul by XLA with one scale for each operand."""

    def ours(a, b):
        lhs, rhs = ScaledArray(a, jnp.float32(2)), ScaledArray(b, jnp.float32(0.25))
        return by_implementation(lhs, rhs, (((1,), (1,)), ((), ())), implementation="xla")

    def whole(a, b):
        yield ..., 2 * a, b / 4

    dtypes = E4M3FN.dtype, E4M3FN.dtype
    return check_product(ours, ((80, 256), (144, 256)), dtypes, (), whole, None, jnp.float32)


def check_block_scaled(kind: Kind) -> Record:
    """Check a product whose tensor cores apply the scales of blocks."""
    m, n, k = 128, 256, 512
    shapes = (m, k // kind.block), (n, k // kind.block)
    scales = [powers_of_two(shape, 3 + i).astype(kind.scale) for i, shape in enumerate(shapes)]
    ours = lambda a, b, s, t: scaled_matmul(a, b, s, t, jnp.float32)

    def whole(a, b):
        s, t = (np.repeat(as_f32(scale), kind.block, 1) for scale in scales)
        yield ..., a * s, b * t

    dtypes = kind.data, kind.data
    return check_product(ours, ((m, k), (n, k)), dtypes, tuple(scales), whole, None, jnp.float32)


def check_attention(implementation: str) -> Record:
    """Check how far attention and its gradients are from the reference, relative to its error."""

    def attend(q, k, v, gradient, implementation):
        attention = partial(
            scaled_dot_product_attention, is_causal=True, implementation=implementation
        )
        y, vjp = jax.vjp(attention, q, k, v)
        return y, *vjp(gradient)

    def in_f32(q, k, v, gradient):
        y, vjp = jax.vjp(partial(jax.nn.dot_product_attention, is_causal=True), q, k, v)
        return y, *vjp(gradient)

    operands = [normal((1, 128, 1, 64), jnp.bfloat16, seed) for seed in range(4)]
    got = run(partial(attend, implementation=implementation), *operands)
    expected = on_cpu(partial(attend, implementation="emulate"), *operands)
    exact = on_cpu(in_f32, *(x.astype(jnp.float32) for x in operands))
    record = {}
    for name, *results in zip(("y", "dq", "dk", "dv"), got, expected, exact, strict=True):
        a, b, c = map(as_f32, results)
        record[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b - c))
        if not record[name] < ATTENTION_ERROR:
            raise AssertionError(f"{name} is off by {record[name]:.3g} of the error of FP8")
    return record


HOPPER, BOTH = (((9, 0), (10, 0)), "pallas"), (((9, 0), (11, 0)), "pallas")
BLACKWELL, WITH_F8, WITH_MX = ((10, 0), (11, 0)), ((8, 9), (99, 0)), ((10, 0), (13, 0))
X = awkward((72, 136), jnp.bfloat16, 1)
HEADS = normal((1, 128, 2, 3, 64), jnp.bfloat16, 1)  # three heads of each of two groups
IN_BLACKWELL = "mosaic_gpu_blackwell"
SIZES, E4, POWERS = (72, 136, 200), E4M3FN, "power_of_two"
F8, F32, BF16 = (E4M3FN.dtype, E5M2.dtype), jnp.float32, jnp.bfloat16

# fmt: off
TABLE = (
    # kernel, task, GPUs, by what, check, its arguments
    ("tensor_amax",     "quantizing", *BOTH, check_tensor_amax, (X,)),
    ("line_amaxes",     "quantizing", *BOTH, check_row_and_column_amax, (X,)),
    ("quantize_tensor", "quantizing", *BOTH, check_quantize_tensor, (X, E4, True)),
    ("quantize_lines",  "quantizing", *BOTH, check_quantize_lines, (X, E4)),
    ("quantize_rows",   "quantizing", *BOTH, check_quantize_rows_in_blocks, (X, E4, 128, POWERS)),
    ("quantize_tiles",  "quantizing", *BOTH, check_quantize_tiles, (X, E4, POWERS)),
    ("matmul",          "products", *HOPPER, check_matmul, (*SIZES, F8, BF16, True, True)),
    ("matmul, fast",    "products", *HOPPER, check_matmul, (*SIZES, F8, BF16, False, False)),
    ("block_matmul",    "products", *HOPPER, check_block_matmul, (*SIZES, F8, F32, True)),
    ("grouped_matmul",  "grouped products", *HOPPER, check_grouped_matmul, (3, 4, 128, 256, True)),
    ("grouped_outer",   "grouped products", *HOPPER, check_grouped_outer, (3, 4, 136, 128, True)),
    ("quantize_heads",  "attention", *BOTH, check_quantize_heads, (HEADS, E4)),
    ("attention_sm90",  "attention", *HOPPER, check_attention, ("mosaic_gpu",)),
    ("attention_sm100", "attention", BLACKWELL, "tcgen05", check_attention, (IN_BLACKWELL,)),
    ("cublaslt_f8",     "cuBLASLt products", WITH_F8, "xla", check_cublaslt, ()),
    ("cudnn_mx",        "MX products", WITH_MX, "cudnn", check_block_scaled, (MX,)),
    ("cudnn_nvfp4",     "NVFP4 products", BLACKWELL, "cudnn", check_block_scaled, (NVFP4,)),
)
# fmt: on
CASES = tuple(Case(*line) for line in TABLE)
