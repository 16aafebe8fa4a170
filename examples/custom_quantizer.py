"""A custom quantizer in thirty lines, and a recipe that uses it.

    python examples/custom_quantizer.py

One outlier sets the scale of a whole tensor, and all other values lose precision. `Clipped` derives
the scale from a quantile of the magnitudes instead: the few values above it saturate.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jfp8
from jfp8.quantizers import Context, Current, Quantizer
from jfp8.recipes import PerOperand, Product


@dataclass(frozen=True)
class Clipped(Quantizer):
    """Quantize by ``scale = quantile(|x|) / fmt.max``: values above the quantile saturate."""

    quantile: float = 0.999

    @property
    def one_for_both(self) -> bool:
        return True  # one scale for all, whichever dimensions are contracted: quantize once

    def __call__(self, x: jax.Array, context: Context) -> jfp8.ScaledArray:
        magnitude = jnp.quantile(jnp.abs(x.astype(jnp.float32)), self.quantile)
        magnitude = jnp.where(jnp.isfinite(context.amax), magnitude, context.amax)
        scale = jfp8.scaling.scale_from_amax(magnitude, self.fmt)
        return self.data_for(x, scale, context)


def main() -> dict[str, float]:
    """Return the errors of a matmul of activations with outliers, in percent."""
    clipped, current = Clipped(jfp8.E2M1FN), Current(jfp8.E2M1FN)
    gradients = Product(None, None)  # in high precision: this example is about the forward matmul
    recipes = {
        f"{q.__class__.__name__} x Current": PerOperand(
            fprop=Product(q, current), dgrad=gradients, wgrad=gradients
        )
        for q in (current, clipped)
    }
    x = jax.random.normal(jax.random.key(0), (256, 512)).at[0, 0].set(20.0)
    w = jax.random.normal(jax.random.key(1), (512, 128))
    contract = (((1,), (0,)), ((), ()))
    exact = jnp.matmul(x, w, precision="highest")
    errors = {}
    for name, recipe in recipes.items():
        y = jfp8.scaled_dot_general(x, w, contract, recipe=recipe)
        errors[name] = float(100 * jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))
        print(f"{name:20s} error {errors[name]:5.1f} %")
    return errors


if __name__ == "__main__":
    main()
