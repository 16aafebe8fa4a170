"""A table of kernels for `check`: some are wrong, hang or crash, on a card made up here."""

import os
import sys
from types import SimpleNamespace

import jax
import numpy as np

from jfp8.command_line import cases
from jfp8.command_line.cases import HOPPER, Case
from jfp8.command_line.exactness import run, same

H200 = {"device_kind": "NVIDIA H200", "platform": "gpu", "compute_capability": "9.0"}
jax.devices = lambda *_: [SimpleNamespace(**H200)]


def doubles(factor):
    print("a library says something")
    x = np.arange(64, dtype=np.float32)
    same(run(lambda x: factor * x, x), [2 * x])


def crashes():
    print("an illegal memory access was encountered", file=sys.stderr, flush=True)
    os.abort()


SINCE = HOPPER[0]
CASES = (
    Case("right", "quantizing", SINCE, "xla", doubles, (2,)),
    Case("wrong", "cuBLASLt products", SINCE, "xla", doubles, (3,)),
    Case("crashing", "grouped products", SINCE, "xla", crashes, ()),
    Case("for Blackwell", "MX products", cases.BLACKWELL, "xla", doubles, (3,)),
)
HARMLESS = CASES[:1]


def kernel_that_drops_a_row(*arguments):
    """Check Hopper's own kernel, whose last row of results is that of the one before."""
    from jfp8.kernels.hopper import matmul

    right = matmul.matmul
    matmul.matmul = lambda *x, **how: (y := right(*x, **how)).at[-1].set(y[-2])
    return cases.check_matmul(*arguments)


(MATMUL,) = (case for case in cases.CASES if case.kernel == "matmul")
SUBTLE = (MATMUL._replace(check=kernel_that_drops_a_row),)
