"""What the driver says about the device while it works."""

from __future__ import annotations

import subprocess

FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def clocks() -> dict[str, str] | None:
    """The first device's name, driver, clocks, temperature and power; None without the tool."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
        return dict(zip(FIELDS, answer.splitlines()[0].split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
