"""Axes that Jupyter shows. The only file that imports matplotlib when it is imported."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Picture(Axes):
    """Axes whose figure Jupyter shows when they are the value of a cell.

    At the end of a cell Jupyter shows the figures that pyplot knows, but not axes. These draw
    their picture themselves, so that their figure does not need pyplot, which would keep it alive.
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        assert isinstance(self.figure, Figure)
        self.figure.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()
