"""Time `import jfp8` against importing its dependencies: JAX, Flax and Optax.

Each import runs in a fresh interpreter, the two alternate, and the figures are medians.

    python benchmarks/import_time.py --repeats 11
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from common import environment

CHECKOUT = Path(__file__).resolve().parent.parent
PEERS = "import jax, flax.linen, flax.nnx, optax"
IMPORTS = {"nothing": "pass", "peers": PEERS, "jfp8": "import jfp8"}


def seconds(code: str) -> float:
    """Return the seconds in which a new interpreter starts, runs `code`, and ends."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CHECKOUT)
    return time.perf_counter() - start


def measure(repeats: int) -> dict[str, float]:
    """Return median seconds of each import, without the first round, which may write bytecode."""
    rounds = [{name: seconds(code) for name, code in IMPORTS.items()} for _ in range(repeats + 1)]
    times = {name: median(r[name] for r in rounds[1:]) for name in IMPORTS}
    return {
        "interpreter_s": round(times["nothing"], 3),
        "jax_flax_optax_s": round(times["peers"] - times["nothing"], 3),
        "jfp8_with_them_s": round(times["jfp8"] - times["nothing"], 3),
        "jfp8_alone_s": round(times["jfp8"] - times["peers"], 3),
        "ratio": round((times["jfp8"] - times["nothing"]) / (times["peers"] - times["nothing"]), 3),
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="interpreters started per import")
    arguments = parser.parse_args()
    results = measure(arguments.repeats)
    report = {"benchmark": "import time", "repeats": arguments.repeats, **environment()}
    print(json.dumps(report | {"results": results}, indent=2))


if __name__ == "__main__":
    main()
