"""Pictures of what FP8 does to numbers, drawn with matplotlib (``pip install 'jfp8[viz]'``). ::

    jfp8.plot.histogram(gradient, jfp8.E5M2)                      # the last line of a cell: shown
    jfp8.plot.histogram(gradient, jfp8.E5M2).figure.savefig("gradient.png")  # in a script

    fig, (left, right) = plt.subplots(1, 2)                       # your own axes
    jfp8.plot.histogram(gradient, jfp8.E5M2, ax=left)
    jfp8.plot.histogram(gradient, jfp8.E4M3FN, ax=right)

Every function takes the data first and returns the `matplotlib.axes.Axes` that it drew on, so that
you can change them further. Without ``ax=`` it draws on a new figure that pyplot does not know:
Jupyter shows it as the value of a cell, nobody has to close it, and a loop may draw a thousand. The
new figure has a title, which ``ax.figure.suptitle("...")`` replaces. On your own axes, set yours.
Colors come from Okabe and Ito's palette, or from light to dark blue, which all kinds of color
vision can tell apart. In print, line styles and hatches tell them apart.
"""

from jfp8.plot.amax_history import amax_history
from jfp8.plot.heat_map import heat_map
from jfp8.plot.histogram import histogram
from jfp8.plot.loss_curves import loss_curves
from jfp8.tracing.listing import listing

__all__ = ["amax_history", "heat_map", "histogram", "loss_curves"]

__dir__ = listing(__all__)
