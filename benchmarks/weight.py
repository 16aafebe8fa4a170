"""Print how much of jfp8 one matmul and one training step enter, and how large its folders are.

    python benchmarks/weight.py

`tests/test_house.py` has a budget for each of these numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import weight


def main() -> None:
    for name, call in (
        ("a gradient of scaled_dot_general", weight.gradient_of_a_product),
        ("init and a training step of Dense", weight.step_of_dense),
    ):
        found = weight.entered(call)
        print(f"{name}: {found.files} files, {found.lines} lines, {found.functions} functions")
        if "--files" in sys.argv:
            print("\n".join(f"  {path}" for path in found.paths))
    program = weight.jaxpr_of_gradient()
    switches = program.count("platform_index")
    print(f"the gradient's jaxpr: {len(program.splitlines())} lines, {switches} platform switches")
    rooms = weight.lines_of_rooms()
    print(f"lines: {sum(rooms.values())}; " + ", ".join(f"{k} {n}" for k, n in rooms.items()))
    every = list(weight.functions())
    for what in ("lines", "complexity", "parameters"):
        largest = max(every, key=lambda f: getattr(f, what))
        print(f"most {what}: {getattr(largest, what)} in {largest.name}")


if __name__ == "__main__":
    main()
