"""Read the driver's report on a device at work."""

from __future__ import annotations

import statistics
import subprocess
import threading
from collections.abc import Callable
from typing import Any

FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
)
# The second name is for drivers before 535.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of the reasons, as NVML names them, that lower the clocks of a device at work.
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
Sample = dict[str, str]


def clocks() -> Sample | None:
    """Return the first device's name, driver, clocks, temperature, power and throttle reasons.

    None without nvidia-smi.
    """
    found = _query(FIELDS)
    if found is not None:
        reasons = _query(REASONS[:1]) or _query(REASONS[1:])
        found["reasons"] = next(iter(reasons.values())) if reasons else "0"
    return found


def _query(fields: tuple[str, ...]) -> Sample | None:
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
        return dict(zip(fields, answer.splitlines()[0].split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def summary(samples: list[Sample]) -> dict[str, Any] | None:
    """Summarize samples: clocks in MHz (least and median), °C, W, and reasons for lower clocks."""
    if not samples:
        return None

    def numbers(field: str) -> list[float]:
        return [float(s[field]) for s in samples if s[field].replace(".", "", 1).isdigit()] or [0.0]

    bits = 0
    for sample in samples:
        bits |= int(sample["reasons"], 16) if sample["reasons"].startswith("0x") else 0
    return {
        "driver_version": samples[-1]["driver_version"],
        "sm_mhz": statistics.median(numbers("clocks.sm")),
        "sm_mhz_least": min(numbers("clocks.sm")),
        "sm_mhz_most_possible": max(numbers("clocks.max.sm")),
        "mem_mhz": statistics.median(numbers("clocks.mem")),
        "celsius": max(numbers("temperature.gpu")),
        "watts": max(numbers("power.draw")),
        "watts_median": statistics.median(numbers("power.draw")),
        "throttled": [name for bit, name in THROTTLES.items() if bits & bit],
        "samples": len(samples),
    }


class Watch:
    """Collect samples of `look`, one after the other on a separate thread, until `stop`."""

    def __init__(self, look: Callable[[], Sample | None]) -> None:
        self._samples: list[Sample] = []
        self._stopped = threading.Event()
        self._look = look
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            seen = self._look()
            if seen is None:
                return
            self._samples.append(seen)
            self._stopped.wait(0.1)

    def stop(self) -> dict[str, Any] | None:
        """Stop, and return the summary of at least one sample."""
        self._stopped.set()
        self._thread.join(timeout=2)
        return summary(list(self._samples))
