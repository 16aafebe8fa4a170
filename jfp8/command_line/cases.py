"""The table of ``check``: a small case of each operation that a planner may leave to a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.command_line.exactness import (
    Record,
    awkward,
    check_sums,
    normal,
    on_cpu,
    powers_of_two,
    run,
    same,
)
from jfp8.kernels.backend import REFERENCE, Backend
from jfp8.kernels.blackwell.backend import MX_BACKEND, NVFP4_BACKEND
from jfp8.kernels.hopper.backend import BACKEND as MOSAIC
from jfp8.kernels.quantize_and_transpose import quantize_both_ways
from jfp8.kernels.xla.f8_dot import BACKEND as XLA
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.ragged.dot import scaled_ragged_dot
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Context, Delayed, Quantizer
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes import Float8BlockScaling
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU, Format
from jfp8.scaling.scales import amax
from jfp8.tracing.device import current_device

LAST = (((1,), (1,)), ((), ()))  # contracting the last dimension of both
Capability = tuple[int, int]


class Case(NamedTuple):
    """Hold a line of the table.

    `by` is ``"pallas"``, which JAX before 0.11.2 cannot import and a CPU interprets; ``"xla"``, on
    any device; or ``"cudnn"``, on GPUs only.
    """

    kernel: str
    task: str  # Planners leave out all kernels for a task if one of them is wrong.
    gpus: tuple[Capability, Capability]  # GPUs with the kernel: from the first, below the second
    by: str
    check: Callable[..., object]  # raises if the kernel is wrong
    arguments: tuple[Any, ...]

    def is_for(self, capability: Capability | None) -> bool:
        """Return whether a GPU of this capability, or a CPU for None, can try the kernel."""
        if self.by == "pallas" and jax.__version_info__ < (0, 11, 2):
            return False
        if capability is None:
            return self.by in ("pallas", "xla")
        return self.gpus[0] <= capability < self.gpus[1]


class Scales(NamedTuple):
    """Describe the scales of both operands: blocks of rows and of k, or one scale, and a dtype."""

    lhs: tuple[int, int] | None
    rhs: tuple[int, int] | None
    dtype: Any = np.dtype(np.float32)


def check_quantizing(quantizer: Quantizer, x: np.ndarray, history: float = 0.0) -> Record:
    """Check a matrix quantized for both directions of contraction in one read."""
    state = None
    if isinstance(quantizer, Delayed):
        state = {"amax_history": jnp.float32([history, 0]), "amax": jnp.float32(0)}

    def ours(x):
        straight, transposed, largest = quantize_both_ways(quantizer, None, x, state)
        return straight.dequantize(), transposed.dequantize(), jnp.max(largest)

    def reference(x):
        largest = amax(x)
        rows, columns = (quantizer(x, Context((d,), largest, state)) for d in (1, 0))
        return rows.dequantize(), columns.dequantize().T, largest

    same(run(ours, x), on_cpu(reference, x))
    return {}


def check_matmul(
    backend: Backend,
    sizes: tuple[int, int, int],
    formats: tuple[Format, Format],
    scales: Scales,
    out: Any,
    fast: bool = False,
) -> Record:
    """Check ``y[i, j] = sum_k a[i, k] b[j, k]``, of dtype `out`; `sizes` are m, n, k."""
    m, n, k = sizes

    def draw(make):
        lhs, rhs = (make((size, k), f.dtype, i) for i, (size, f) in enumerate(zip((m, n), formats)))
        return _scaled(lhs, scales.lhs, scales.dtype), _scaled(rhs, scales.rhs, scales.dtype)

    spec = MatmulSpec(LAST, np.dtype(out), fast_accumulation=fast, device=current_device())
    return check_sums(
        lambda lhs, rhs: backend.multiply(lhs, rhs, spec),
        lambda lhs, rhs: REFERENCE.multiply(lhs, rhs, spec),
        draw,
        terms=128 if backend is MOSAIC and not fast else k,
    )


def _scaled(data: np.ndarray, block: tuple[int, int] | None, dtype: Any) -> ScaledArray:
    """Return `data` with powers of two as the scales of its blocks."""
    if block is not None:
        block = min(block[0], data.shape[0]), min(block[1], data.shape[1])
    counts = () if block is None else tuple(np.ceil(np.divide(data.shape, block)).astype(int))
    scale = jnp.asarray(powers_of_two(counts, len(data)).astype(dtype))
    return ScaledArray(jnp.asarray(data), scale, block)


def check_grouped(rows: int, sizes: tuple[int, ...], k: int, n: int) -> Record:
    """Check the matmuls of `rows`, in groups of `sizes`, with a matrix each, and the gradients."""

    def draw(make):
        shapes = (rows, k), (len(sizes), k, n), (rows, n)
        return tuple(make(shape, jnp.bfloat16, seed) for seed, shape in enumerate(shapes))

    def products(x, w, dy, implementation):
        how = {"recipe": Float8BlockScaling(), "implementation": implementation}
        grouped = lambda x, w: scaled_ragged_dot(x, w, jnp.int32(sizes), **how)
        y, vjp = jax.vjp(grouped, x, w)
        return y, *vjp(dy)

    ours, reference = (partial(products, implementation=i) for i in ("mosaic_gpu", "emulate"))
    return check_sums(ours, reference, draw, terms=128)


HOPPER, BOTH = (((9, 0), (10, 0)), "pallas"), (((9, 0), (11, 0)), "pallas")
BLACKWELL, WITH_F8, WITH_MX = ((10, 0), (11, 0)), ((8, 9), (99, 0)), ((10, 0), (13, 0))
X, FINITE = (make((72, 136), jnp.bfloat16, 1) for make in (awkward, normal))
E4, F4, PAIR, SAME = E4M3FN, (E2M1FN, E2M1FN), (E4M3FN, E5M2), (E4M3FN, E4M3FN)
DELAYED, BY_LINE = Delayed(E4, length=2), Rowwise(E4)
IN_128, IN_TILES = (Blockwise(E4, block, "power_of_two") for block in ((128, 1), (128, 128)))
ODD, EVEN, BF16, F32 = (72, 136, 200), (128, 256, 512), jnp.bfloat16, jnp.float32
TENSOR, ROWS, BLOCKS = Scales(None, None), Scales((1, 200), (1, 200)), Scales((1, 128), (128, 128))
OF_MX, OF_F4 = Scales((1, 32), (1, 32), E8M0FNU.dtype), Scales((1, 16), (1, 16), E4M3FN.dtype)

# fmt: off
TABLE = (
    # kernel, task, GPUs, by what, check, its arguments
    ("tensor_amax",     "quantizing", *BOTH, check_quantizing, (DELAYED, FINITE)),
    ("quantize_tensor", "quantizing", *BOTH, check_quantizing, (DELAYED, X, 3.7)),
    ("quantize_lines",  "quantizing", *BOTH, check_quantizing, (BY_LINE, X)),
    ("quantize_rows",   "quantizing", *BOTH, check_quantizing, (IN_128, X)),
    ("quantize_tiles",  "quantizing", *BOTH, check_quantizing, (IN_TILES, FINITE)),
    ("matmul",          "products", *HOPPER, check_matmul, (MOSAIC, ODD, PAIR, ROWS, BF16)),
    ("matmul, fast",    "products", *HOPPER, check_matmul, (MOSAIC, ODD, PAIR, TENSOR, BF16, True)),
    ("block_matmul",    "products", *HOPPER, check_matmul, (MOSAIC, ODD, PAIR, BLOCKS, F32)),
    ("block_matmul, transposed",
     "products", *HOPPER, check_matmul, (MOSAIC, ODD, PAIR, Scales(*BLOCKS[1::-1]), F32)),
    ("grouped_matmul",  "grouped products", *HOPPER, check_grouped, (300, (150, 0, 130), 256, 136)),
    ("cublaslt_f8",     "cuBLASLt products", WITH_F8, "xla",
     check_matmul, (XLA, EVEN, SAME, TENSOR, F32)),
    ("cudnn_mx",        "MX products", WITH_MX, "cudnn",
     check_matmul, (MX_BACKEND, EVEN, SAME, OF_MX, F32)),
    ("cudnn_nvfp4",     "NVFP4 products", BLACKWELL, "cudnn",
     check_matmul, (NVFP4_BACKEND, EVEN, F4, OF_F4, F32)),
)
# fmt: on
CASES = tuple(Case(*line) for line in TABLE)
