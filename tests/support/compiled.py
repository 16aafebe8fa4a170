"""The readers of compiled programs in `examples`, where tests find them."""

from support.scripts import on_path

with on_path("examples"):
    from audit import Audit, Launches, Matmuls, audit, audit_of, large
    from compiled.hlo import Hlo, Instruction, read
    from compiled.sent import Collective, CollectiveBytes, collective_bytes

__all__ = [
    "Audit",
    "Collective",
    "CollectiveBytes",
    "Hlo",
    "Instruction",
    "Launches",
    "Matmuls",
    "audit",
    "audit_of",
    "collective_bytes",
    "large",
    "read",
]
