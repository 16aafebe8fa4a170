"""Measure Muon's Newton-Schulz iteration with low-precision matmuls, by spectra of its input.

    python benchmarks/polar_factors.py        # a minute

Each matrix has 128 x 256 elements, random singular vectors and the singular values of a spectrum.
Exact is the same iteration in float64, from NumPy's singular value decomposition. Errors are root
mean square singular values: Frobenius norms divided by the root of the number of rows.

  one matmul   the worst error of one matmul of the iteration, over the product of the spectral
               norms of its operands
  bound        on the error, to first order in one matmul's error: see below
  error        from the exact iteration
  largest      singular value; 1.2 in the exact iteration at most
  to UV        from the exact polar factor, and in brackets for the exact iteration

The bound: let X have m rows and singular values of at most s. The library computes a step through
R = 1 - X Xᵀ:

    X  <-  (c0 + c1 + c2) X + B X,      B = c2 R R - (c1 + 2 c2) R

Suppose that each matmul satisfies ‖fl(PQ) - PQ‖ <= η √m ‖P‖₂ ‖Q‖₂ in the Frobenius norm. To first
order, the three errors add up to

    d  =  η s (s² (|c1 + 2 c2| + 2 c2 ‖R‖₂) + c2 ‖R‖₂² + ‖B‖₂)        in units of √m

Errors of earlier steps grow by L, the largest divided difference of p(σ) = c0 σ + c1 σ³ + c2 σ⁵ at
pairs of signed singular values (Daleckii and Krein), so after k steps the error is at most the sum
of d_j L_{j+1} ... L_k. The observed error is at most 5 η.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from jfp8.optim.muon import matmul_in, orthogonalize  # noqa: E402

ROWS, COLUMNS = 128, 256
C0, C1, C2 = COEFFS = (3.4445, -4.7750, 2.0315)
STEPS = 5
PRODUCTS = {"f32": None, "bf16": "bf16", "current": "current", "rowwise": "rowwise"}


def matrices() -> dict[str, np.ndarray]:
    """Return one matrix for each spectrum."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(ROWS, ROWS)))
    v, _ = np.linalg.qr(rng.normal(size=(COLUMNS, ROWS)))
    index = np.arange(1, ROWS + 1)
    noise = rng.normal(size=(ROWS, COLUMNS)) / np.sqrt(COLUMNS)
    poisoned = rng.normal(size=(ROWS, COLUMNS))
    poisoned[3, 5] = np.nan
    return {
        "flat": u @ v.T,
        "normal": noise,
        "power law": u * index**-1.0 @ v.T,
        "rank one and noise": 10 * np.outer(u[:, 0], v[:, 0]) + noise,
        "rank one": np.ones((ROWS, COLUMNS)),
        "zero": np.zeros((ROWS, COLUMNS)),
        "NaN": poisoned,
    }


def exact_path(values: np.ndarray) -> np.ndarray:
    """Return the singular values before each step and after the last, [STEPS + 1, ROWS]."""
    path = [values / np.linalg.norm(values)]
    for _ in range(STEPS):
        s = path[-1]
        path.append(C0 * s + C1 * s**3 + C2 * s**5)
    return np.stack(path)


def bound(path: np.ndarray, eta: float) -> float:
    """Bound the error after the last step, if each matmul has the error `eta`."""
    error = 0.0
    for s, after in zip(path[:-1], path[1:], strict=True):
        top, r = s.max(), np.abs(1 - s**2).max()
        b = np.abs(C2 * (1 - s**2) ** 2 - (C1 + 2 * C2) * (1 - s**2)).max()
        new = eta * top * (top**2 * (abs(C1 + 2 * C2) + 2 * C2 * r) + C2 * r**2 + b)
        error = grown(s, after) * error + new
    return error


def grown(s: np.ndarray, after: np.ndarray) -> float:
    """Return the largest factor by which a step may multiply a small error: divided differences."""
    near, far = s[:, None] - s, s[:, None] + s
    slope = np.abs(C0 + 3 * C1 * s**2 + 5 * C2 * s**4)[:, None]
    apart = np.abs(near) > 1e-9
    between = np.where(apart, np.abs(after[:, None] - after) / np.where(apart, near, 1), slope)
    across = np.abs(after[:, None] + after) / np.maximum(far, 1e-300)
    return max(np.abs(between).max(), across[far > 1e-12].max())


def measured(x: np.ndarray, products: str | None) -> tuple[np.ndarray, float]:
    """Return the result of the iteration, and the worst error of its matmuls."""
    errors = [0.0]

    def matmul(p, q):
        y = multiply(p, q)
        wide = [np.asarray(z[0], np.float64) for z in (p, q)]
        norms = [np.linalg.norm(z, 2) if np.isfinite(z).all() else 0 for z in wide]
        if min(norms) > 0:
            difference = np.linalg.norm(np.asarray(y[0], np.float64) - wide[0] @ wide[1])
            errors.append(difference / np.sqrt(y.shape[1]) / norms[0] / norms[1])
        return y

    multiply = matmul_in(products)
    given = jnp.asarray(x[None], jnp.float32), np.asarray([COEFFS] * STEPS, np.float32)
    y = orthogonalize(*given, "frobenius", 1e-8, matmul, shifted=products is not None)
    return np.asarray(y[0], np.float64), max(errors)


def row(x: np.ndarray, products: str | None) -> dict[str, float]:
    """Return the columns of the table; see the top of this file."""
    y, eta = measured(x, products)
    if not (np.isfinite(x).all() and x.any()):
        return {"all zero": float((y == 0).all()), "all NaN": float(np.isnan(y).all())}
    u, values, vt = np.linalg.svd(x.astype(np.float32).astype(np.float64), full_matrices=False)
    path = exact_path(values)
    rms = lambda z: np.linalg.norm(z) / np.sqrt(ROWS)
    return {
        "one matmul": eta,
        "bound": bound(path, eta),
        "error": rms(y - u * path[-1] @ vt),
        "largest": np.linalg.norm(y, 2),
        "to UV": rms(y - u @ vt),
        "exact to UV": rms(path[-1] - 1),
    }


def main() -> None:
    print("| spectrum | matmuls | one matmul | bound | error | largest | to UV |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for spectrum, x in matrices().items():
        for name, products in PRODUCTS.items():
            found = row(x, products)
            if "all NaN" in found:
                what = "all zero" if found["all zero"] else "all NaN" if found["all NaN"] else "?"
                print(f"| {spectrum} | {name} | {what} | | | | |")
                continue
            cells = [f"{found[c]:.2g}" for c in ("one matmul", "bound", "error", "largest")]
            to = f"{found['to UV']:.2f} ({found['exact to UV']:.2f})"
            print(f"| {spectrum} | {name} | {' | '.join(cells)} | {to} |")


if __name__ == "__main__":
    main()
