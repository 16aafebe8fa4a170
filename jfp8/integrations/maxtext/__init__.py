"""MaxText with the recipes of jfp8, by its own ``quantization`` option and without an edit of it.

    python -m jfp8.integrations.maxtext base.yml quantization=jfp8_delayed ...

`enabled` does the same for a script of yours. See docs/trainers/maxtext.md.
"""

from jfp8.integrations.maxtext.enabled import enabled

__all__ = ["enabled"]
