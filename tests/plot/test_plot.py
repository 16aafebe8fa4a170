"""What is drawn is what numpy and ml_dtypes count; and the pictures can be read."""

import io
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8 import plot
from jfp8.plot import style
from support.rows import row

matplotlib = pytest.importorskip("matplotlib")

from matplotlib import image  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

MATRIX = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)

PICTURES = {
    "histogram": lambda ax=None: plot.histogram(MATRIX, jfp8.E4M3FN, ax=ax),
    "amax_history": lambda ax=None: plot.amax_history([row(), row(10)], ax=ax),
    "heat_map": lambda ax=None: plot.heat_map([row(), row(10)], ax=ax),
    "loss_curves": lambda ax=None: plot.loss_curves({"f32": [3.0, 2.0]}, ax=ax),
}
each_picture = pytest.mark.parametrize("name", PICTURES)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def refuses(match, function, *args, error=ValueError, **kwargs):
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


def test_every_function_is_listed():
    assert sorted(PICTURES) == plot.__all__


@each_picture
def test_axes_say_what_they_show_and_a_figure_of_its_own_has_a_title_that_fits(name):
    ax = PICTURES[name]()
    assert ax.get_xlabel()
    assert ax.get_ylabel() or [label.get_text() for label in ax.get_yticklabels()]
    figure = ax.figure
    assert len(figure.get_suptitle().split()) >= 4
    assert figure.get_suptitle()[0].isupper()
    figure.draw_without_rendering()
    assert figure._suptitle.get_window_extent().width < figure.bbox.width


@pytest.mark.representative(1)
@each_picture
def test_jupyter_shows_the_axes_and_nothing_is_left_behind(name):
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    height, width, _ = image.imread(io.BytesIO(PICTURES[name]()._repr_png_())).shape
    assert 150 < height < 1200
    assert 300 < width <= 750  # 7 inches and a margin
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


@each_picture
def test_draws_on_the_axes_it_is_given(name):
    left, right = Figure(layout="constrained").subplots(1, 2)
    assert PICTURES[name](ax=left) is left
    assert left.has_data()
    assert not right.has_data()
    assert not left.figure.get_suptitle()


@pytest.mark.slow
def test_importing_jfp8_plot_does_not_import_matplotlib():
    code = "import sys, jfp8.plot; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(r"pip install 'jfp8\[viz\]'", plot.histogram, [1.0], error=ImportError)


def test_percent():
    texts = {0.0: "0 %", 1.0: "100 %", 0.12345: "12.3 %", 0.00123: "0.12 %", 2**-16: "0.0015 %"}
    texts |= {3e-6: "0.0003 %", 1e-9: "< 0.0001 %"}
    assert {fraction: style.percent(fraction) for fraction in texts} == texts


def bars(ax):
    """{exponent: height}, of bars that are as wide as their power of two."""
    for bar in ax.patches:
        if isinstance(bar, matplotlib.patches.Rectangle) and bar.get_facecolor()[3] == 1:
            assert bar.get_width() == bar.get_x()
    return {int(np.log2(bar.get_x())): bar.get_height() for bar in ax.containers[0]}


def spans(ax):
    """The ends of all hatched and gray stretches, with their labels."""
    bars = set(ax.containers[0].patches)
    stretches = [patch for patch in ax.patches if patch not in bars]
    ends = [(p.get_x(), p.get_x() + p.get_width()) for p in stretches]
    return {p.get_label(): end for p, end in zip(stretches, ends, strict=True)}


def span(ax, word):
    (found,) = (end for label, end in spans(ax).items() if word in label)
    return found


def skewed(shape, dtype=np.float32):
    rng = np.random.default_rng(1)
    x = rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))
    return np.clip(x, -60000, 60000).astype(dtype)  # float16 ends at 65504


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_histogram_counts_powers_of_two(dtype):
    x = skewed((40, 50), dtype)
    x[:3] = 0
    nonzero = np.abs(x.astype(np.float64))[x != 0]
    exponents, counts = np.unique(np.floor(np.log2(nonzero)), return_counts=True)
    ax = plot.histogram(jnp.asarray(x))
    assert bars(ax) == pytest.approx(dict(zip(exponents, counts * 100 / x.size)), rel=1e-12)
    assert "zeros: 7.5 %" in legend(ax)
    assert ax.get_xscale() == "log"


def test_histogram_of_f32_subnormals_is_that_of_the_statistics():
    x = np.array([2.0**-126, 2.0**-127, 2.0**-149, 1.0], np.float32)
    assert bars(plot.histogram(x)) == {-126: 25.0, -127: 50.0, 0: 25.0}


@pytest.mark.parametrize("exponent", [-12, 0])
@pytest.mark.parametrize(("fmt", "dtype"), [(jfp8.E4M3FN, E4M3), (jfp8.E5M2, E5M2)])
def test_histogram_says_what_is_lost(fmt, dtype, exponent):
    # A power of two, by which ml_dtypes sees exactly what the format would.
    scale = 2.0**exponent
    largest, smallest = float(ml_dtypes.finfo(dtype).max), fmt.smallest_subnormal
    ties = np.float32([largest * 1.01, smallest / 2, smallest / 1.99, largest])
    ends = np.float32([464, 61440, np.nextafter(464, 500), np.nextafter(61440, 60000)])
    x = np.concatenate([skewed(1000) * 2.0**-6, ties * scale, ends * scale]).astype(np.float32)
    data = (x / scale).astype(dtype)  # beyond the largest value: NaN in E4M3FN, Inf in E5M2
    underflow, overflow = np.mean(data == 0), np.mean(~np.isfinite(data.astype(np.float32)))
    assert overflow > 0
    ax = plot.histogram(x, fmt, scale)
    assert f"underflow, becomes 0: {style.percent(underflow)}" in legend(ax)
    assert f"overflow, saturates: {style.percent(overflow)}" in legend(ax)


def test_histogram_shades_what_is_lost():
    scale = 2.0**-4
    ax = plot.histogram(np.float32([1.0, 2.0]), jfp8.E4M3FN, scale)
    rounded = lambda x: float(np.float32(x / scale).astype(E4M3))
    low = span(ax, "underflow")[1]
    assert rounded(low) == 0
    assert rounded(np.nextafter(np.float32(low), np.float32(1))) > 0
    high = span(ax, "overflow")[0]
    assert rounded(high) == 448
    assert np.isnan(rounded(np.nextafter(np.float32(high), np.float32(1e3))))
    smallest_normal = float(ml_dtypes.finfo(E4M3).smallest_normal)
    assert span(ax, "subnormal") == (low, smallest_normal * scale)
    left, right = ax.get_xlim()
    assert span(ax, "underflow")[0] <= left < low
    assert high < right <= span(ax, "overflow")[1]


def test_histogram_of_nan_and_inf():
    x = np.float32([np.nan, np.inf, -np.inf, 1.0, -1e9, 0.0, 0.0, 0.0])
    ax = plot.histogram(x, jfp8.E4M3FN, 1.0)
    assert bars(ax) == {0: 12.5, 29: 12.5}
    assert set(labeled(ax, "amax")[0]) == {1e9}
    assert legend(ax)[1:] == [
        "underflow, becomes 0: 0 %",
        "overflow, saturates: 12.5 %",
        "subnormal, fewer bits",
        "zeros: 37.5 %",
        "NaN or Inf: 37.5 %",
    ]


def test_histogram_of_a_row():
    exponents = {-30: 2, -5: 10, 0: 4}
    given = {"exponents": exponents, "underflow": 0.125, "overflow": 0.25, "nonfinite": 0.5}
    ax = plot.histogram(row(format="E5M2", amax=1.5, **given))
    assert bars(ax) == {-30: 12.5, -5: 62.5, 0: 25.0}
    assert legend(ax) == [
        "amax",
        "underflow, becomes 0: 12.5 %",
        "overflow, saturates: 25.0 %",
        "subnormal, fewer bits",
        "NaN or Inf: 50.0 %",
    ]
    assert span(ax, "underflow")[1] == 2.0**-8 * 2.0**-17
    assert "not zero" in ax.get_ylabel()
    zeros = plot.histogram(row(exponents={}, amax=0.0, sqnr=np.nan, headroom=np.inf))
    assert len(zeros.containers[0]) == 0
    assert zeros._repr_png_()


def test_histogram_of_a_row_with_many_scales():
    ax = plot.histogram(row(format="E4M3FN", scale_min=2.0**-10, scale_max=2.0**-4))
    assert span(ax, "underflow")[1] == 2.0**-10 * 2.0**-10
    assert span(ax, "overflow")[0] == 2.0**-4 * 464
    assert span(ax, "some blocks") == (2.0**-10 * 2.0**-10, 2.0**-4 * 2.0**-10)
    ends = [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches]
    assert (2.0**-10 * 464, 2.0**-4 * 464) in ends


def test_histogram_refuses():
    x = np.ones(3, np.float32)
    refuses(
        r"no elements to draw: its shape is \(0, 4\)", plot.histogram, np.zeros((0, 4), np.float32)
    )
    refuses(r"histogram\(x, jfp8.E4M3FN, scale=2.0\)", plot.histogram, x, scale=2.0)
    for scale in (0.0, -1.0, np.inf, np.nan):
        refuses("must be a positive, finite number", plot.histogram, x, jfp8.E4M3FN, scale)
    refuses("holds scales, not data", plot.histogram, x, jfp8.E8M0FNU, error=TypeError)
    refuses("one of jfp8.E4M3FN", plot.histogram, x, 4, error=TypeError)
    refuses("dtype int32", plot.histogram, np.ones(3, np.int32), error=TypeError)
    refuses("contains its format and its scales", plot.histogram, row(), jfp8.E4M3FN)
    refuses("no format called 'mine'. Formats: E4M3FN", plot.histogram, row(format="mine"))


def labeled(ax, word):
    (line,) = (line for line in ax.lines if word in line.get_label())
    return np.array(line.get_xdata(), np.float64), np.array(line.get_ydata(), np.float64)


def test_amax_history_of_a_few_steps_in_a_narrow_range_has_numbers_at_its_axes():
    scale = {"scale_min": 1.0 / 448, "scale_max": 1.0 / 448}
    ax = plot.amax_history([row(i, amax=1 + 0.4 * i, **scale) for i in range(3)])
    assert {"1.25", "1.5"} < {tick.get_text() for tick in ax.get_yticklabels()}
    assert all(tick.is_integer() for tick in ax.get_xticks())


def test_amax_history_marks_zeros_and_nonfinite():
    amaxes = [1.0, 0.0, np.inf, np.nan, 2.0]
    rows = [row(i, amax=a, nonfinite=not np.isfinite(a)) for i, a in enumerate(amaxes)]
    ax = plot.amax_history(rows)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1.0, np.nan, np.nan, np.nan, 2.0])
    assert list(labeled(ax, "amax is 0")[0]) == [1]
    assert list(labeled(ax, "NaN or Inf")[0]) == [2, 3]
    assert "saturates" not in "".join(legend(ax))
    assert ax._repr_png_()


def test_amax_history_of_rows():
    rows = [row(20, amax=4.0, overflow=0.5), row(0, amax=1.0), row(10, amax=2.0, nonfinite=0.25)]
    rows += [row(10, "Dense_1", amax=99.0), row(20, amax=8.0, overflow=0.25)]  # a resumed run
    ax = plot.amax_history(rows, name="Dense_0 grad")
    steps, amax = ax.lines[0].get_data()
    assert (list(steps), list(amax)) == ([0, 10, 20], [1.0, 2.0, 8.0])
    np.testing.assert_array_equal(labeled(ax, "limit of")[1], 448 * 2.0**-8)
    assert list(labeled(ax, "saturates")[0]) == [20]
    assert list(labeled(ax, "NaN or Inf")[0]) == [10]
    assert ax.figure.get_suptitle() == "Amax of Dense_0 grad over the steps"
    given = plot.amax_history(rows, name="Dense_0 grad", ax=Figure().subplots())
    assert given.get_legend().get_title().get_text() == "Dense_0 grad"
    assert not ax.collections  # no band: there is one scale


def test_amax_history_of_scales_by_block():
    ax = plot.amax_history([row(0, scale_min=0.5, scale_max=2.0), row(1, scale_max=4.0)])
    np.testing.assert_array_equal(labeled(ax, "limit of")[1], [2.0 * 448, 4.0 * 448])
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert {0.5 * 448, 2.0 * 448, 4.0 * 448, 448 * 2.0**-8} <= set(heights)


def test_amax_history_refuses():
    rows = [row(0), row(0, "Dense_1")]
    refuses(r"'Dense_0 grad', 'Dense_1 grad'. Choose one of them: ", plot.amax_history, rows)
    many = [row(path=f"Dense_{i}") for i in range(9)]
    refuses("'Dense_7 grad'. Choose one of them: ", plot.amax_history, many[:8])
    refuses("'Dense_7 grad', .... Choose one of them: ", plot.amax_history, many)
    refuses(
        "got name='Dense_2 grad', but the rows describe",
        plot.amax_history,
        rows,
        name="Dense_2 grad",
    )
    refuses("one of them is a float", plot.amax_history, [row(0), 1.0], error=TypeError)
    refuses("Only some rows have a step", plot.amax_history, [row(0), row(None)])
    refuses("got no rows", plot.amax_history, [])


def mapped(ax):
    return ax.collections[0].get_array()


def marked(ax):
    """By its label in the legend, the squares (row, column) that are hatched alike."""
    found = {}
    for squares in ax.collections[1:]:
        assert squares.get_hatch()
        corners = [path.vertices.min(axis=0) for path in squares.get_paths()]
        found[squares.get_label()] = {(int(y), int(x)) for x, y in corners}
    assert legend(ax) == list(found) if found else ax.get_legend() is None
    assert len({squares.get_hatch() for squares in ax.collections[1:]}) == len(found)
    return found


def labels_of(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def test_heat_map_has_a_row_for_each_layer_and_a_column_for_each_step():
    rows = [
        row(step, path, order=order, underflow=underflow)
        for step, path, order, underflow in [
            (20, "late", 5, 0.5),
            (0, "early", 1, 0.25),
            (10, "early", 1, 0.125),
            (0, "late", 5, 0.0),
            (20, "early", 1, 1e-7),
        ]
    ]
    rows.append(row(0, "early", "lhs", underflow=0.75))  # another tensor
    ax = plot.heat_map(rows)
    assert labels_of(ax) == ["early", "late"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "10", "20"]
    assert mapped(ax).tolist() == [[25.0, 12.5, 0.001], [0.0, None, 50.0]]
    assert ax.get_ylim() == (2, 0)  # downwards
    assert "underflow of grad" in ax.figure.axes[1].get_ylabel()


def test_heat_map_marks_dead_tensors_and_those_that_are_not_finite():
    """Without a mark a dead gradient would look good; one that is not all finite is not dead."""
    rows = [
        row(0, "a", order=0, underflow=0.5),
        row(10, "a", order=0, amax=0.0, rms=0.0, exponents={}),
        row(0, "b", order=1),
        row(10, "b", order=1, underflow=1.0),  # is not zero until it is rounded
        row(0, "c", order=2, nonfinite=1.0, amax=0.0, sqnr=np.nan),
        row(10, "c", order=2, nonfinite=1e-3),
    ]
    dead, bad = {"dead: all zeros": {(0, 1)}}, {"NaN or Inf": {(2, 0), (2, 1)}}
    assert marked(plot.heat_map(rows, "amax")) == dead | bad
    assert marked(plot.heat_map(rows, "sqnr")) == dead | bad | {"no number": {(2, 0)}}
    assert marked(plot.heat_map(rows, "nonfinite")) == dead  # whose colors say the rest
    assert mapped(plot.heat_map(rows[:4])).tolist() == [[50.0, 0.0], [0.0, 100.0]]
    assert marked(plot.heat_map([row(), row(10)])) == {}


def test_heat_map_of_amax_spans_its_decades():
    ax = plot.heat_map([row(0, amax=0.02), row(1, amax=300.0), row(2, amax=0.0)], "amax")
    assert ax.collections[0].get_clim() == (0.01, 1000.0)
    ticks = [label.get_text() for label in ax.figure.axes[1].get_yticklabels()]
    assert ticks == ["0.01", "0.1", "1", "10", "100", "1000"]


def test_heat_map_of_several_tensors_products_and_stacked_layers():
    rows = [
        row(0, "a", "lhs", order=0),
        row(0, "a", "grad", order=1, products="dgrad"),
        row(0, "a", "grad", order=2, products="wgrad"),
    ]
    names = ["a lhs", "a grad (dgrad)", "a grad (wgrad)"]
    assert labels_of(plot.heat_map(rows, tensor=None)) == names
    assert labels_of(plot.heat_map(rows, tensor="grad")) == ["a (dgrad)", "a (wgrad)"]
    rows = [row(0, "model/blocks/mlp", index=(i,), sqnr=float(i)) for i in range(3)]
    ax = plot.heat_map(rows, "sqnr")
    assert labels_of(ax) == ["mlp[0]", "mlp[1]", "mlp[2]"]  # without what they have in common
    assert mapped(ax).tolist() == [[0.0], [1.0], [2.0]]


def test_heat_map_counts_the_last_of_several_rows_for_a_step():
    for step in (0, None):
        ax = plot.heat_map([row(step, sqnr=1.0), row(step, sqnr=2.0)], "sqnr")
        assert mapped(ax).tolist() == [[2.0]]


@pytest.mark.parametrize(("value", "worst"), [("underflow", "max"), ("sqnr", "min")])
def test_heat_map_of_many_steps_shows_the_worst(value, worst):
    rng = np.random.default_rng(2)
    numbers = rng.uniform(0.01, 0.02, size=503)
    numbers[77] = {"max": 0.9, "min": 0.001}[worst]  # one step must not be lost
    ax = plot.heat_map([row(i, **{value: float(n)}) for i, n in enumerate(numbers)], value)
    parts = [numbers[i : i + 3] for i in range(0, 503, 3)]
    expected = np.array([getattr(part, worst)() for part in parts])
    drawn = mapped(ax)[0] / (100 if value == "underflow" else 1)
    np.testing.assert_allclose(drawn, expected, rtol=1e-12)
    assert ax.get_xlabel() == "step (a column: the worst of 3)"
    assert ax.figure.get_figwidth() == 7  # the width of a page


def test_heat_map_refuses():
    refuses(r"heat_map got no rows. Recorder.rows is empty until", plot.heat_map, [])
    refuses(
        r"one of them is a dict. Rows come from stats.rows\(step\)",
        plot.heat_map,
        [{"step": 0}],
        error=TypeError,
    )
    refuses("value='loss': must be one of 'amax', 'scale_min", plot.heat_map, [row()], "loss")
    refuses("tensor='lhs': the rows describe 'grad'", plot.heat_map, [row()], tensor="lhs")
    refuses("Only some rows have a step", plot.heat_map, [row(0), row(None)])


def test_loss_curves_are_means_within_the_range_of_the_seeds():
    rng = np.random.default_rng(3)
    runs = {"float32": rng.normal(5, 1, (3, 40)), "FP8": rng.normal(4, 1, 40)}
    ax = plot.loss_curves(runs, steps=10 * np.arange(40))
    mean, single = ax.lines
    np.testing.assert_array_equal(mean.get_xdata(), 10 * np.arange(40))
    np.testing.assert_allclose(mean.get_ydata(), runs["float32"].sum(axis=0) / 3, rtol=1e-12)
    np.testing.assert_array_equal(single.get_ydata(), runs["FP8"])
    (band,) = ax.collections  # one seed has none
    path = band.get_paths()[0].vertices
    for step in range(40):
        ends = path[path[:, 0] == 10 * step][:, 1]
        seeds = sorted(runs["float32"][:, step])
        np.testing.assert_allclose([ends.min(), ends.max()], [seeds[0], seeds[-1]], rtol=1e-12)
    assert legend(ax) == ["float32", "FP8"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss")
    assert mean.get_linestyle() != single.get_linestyle()


def test_loss_curves_average_over_a_window():
    losses = np.array([[6.0, 3.0, 0.0, 9.0], [0.0, 0.0, 3.0, 0.0]])
    ax = plot.loss_curves({"a": losses}, window=3)
    assert ax.lines[0].get_xdata().tolist() == [2, 3]
    assert ax.lines[0].get_ydata().tolist() == [2.0, 2.5]  # means of 3 and 1, of 4 and 1
    assert ax.get_ylabel() == "loss, mean of 3 steps"


def test_loss_curves_say_what_diverged():
    losses = np.array([[4.0, 3.0, 2.0, 1.0], [5.0, 4.0, np.nan, np.nan]])
    dead = [np.inf] * 4
    ax = plot.loss_curves({"a": losses, "b": losses[1], "dead": dead})
    counts = {"a": "1 of 2", "b": "1 of 1", "dead": "1 of 1"}
    assert legend(ax) == [f"{name} ({count} not finite)" for name, count in counts.items()]
    a, a_mark, b, b_mark, c = ax.lines
    assert a.get_ydata().tolist() == [4.5, 3.5, 2.0, 1.0]
    np.testing.assert_array_equal(b.get_ydata(), [5.0, 4.0, np.nan, np.nan])
    np.testing.assert_array_equal(c.get_ydata(), [np.nan] * 4)
    for mark in (a_mark, b_mark):
        assert mark.get_xydata().tolist() == [[1.0, 4.0]]
    assert ax._repr_png_()


def test_loss_curves_refuse():
    refuses("got no runs. Pass a dict", plot.loss_curves, {})
    refuses(r"not empty; got \{'a': \(1, 0\)\}", plot.loss_curves, {"a": []})
    refuses("same number of steps", plot.loss_curves, {"a": [1.0], "b": [1.0, 2.0]})
    refuses(
        r"2 steps, but steps has the shape \(1,\)", plot.loss_curves, {"a": [1.0, 2.0]}, steps=[1]
    )
    for window in (0, 3):
        refuses("must be from 1 to 2", plot.loss_curves, {"a": [1.0, 2.0]}, window=window)


@pytest.mark.parametrize(
    ("value", "label", "low", "high"),
    [
        ("underflow", "underflow of grad (% of the elements, white: 0)", 1e-3, 100),
        ("overflow", "overflow of grad (% of the elements, white: 0)", 1e-3, 100),
        ("nonfinite", "NaN or Inf of grad (% of the elements, white: 0)", 1e-3, 100),
        ("sqnr", "SQNR of grad (dB)", 0, 40),
        ("headroom", "headroom of grad (bits)", -2, 14),
    ],
)
def test_heat_map_of_each_value_has_its_own_colors(value, label, low, high):
    ax = plot.heat_map([row(0, **{value: 0.25}), row(1, **{value: np.nan})], value)
    assert mapped(ax).tolist() == [[25.0 if high == 100 else 0.25, None]]
    assert marked(ax) == {"no number": {(0, 1)}}
    (mesh,) = (c for c in ax.collections if c.colorbar is not None)
    assert " ".join(mesh.colorbar.ax.get_ylabel().split()) == label
    assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx((low, high))
