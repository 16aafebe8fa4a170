"""The lines of a tree of layers, against ones that are written down."""

from __future__ import annotations

import pytest

from jfp8.conversion.layer_tree import tree_lines


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((0, 1), "block_{0,1}"),
        ((0, 1, 2), "block_{0..2}"),
        ((0, 2, 3, 4, 9), "block_{0,2..4,9}"),
        ((8, 9, 10, 11), "block_{8..11}"),
        (("00", "01", "02"), "block_{00..02}"),
        ((3,), "block_3"),
    ],
)
def test_siblings_that_are_alike_are_one_line(numbers, name):
    """Alike are names that differ in the last number only."""
    blocks = {f"w1_block_{n}": "same" for n in numbers}
    (line, *others) = tree_lines({**blocks, "w2_block_0": "same", "mlp/up": 1, "mlp": 2})
    assert (line.name, line.layers) == (f"w1_{name}", tuple(blocks))
    assert [other.name for other in others] == ["w2_block_0", "mlp", "up"]


def test_alike_are_layers_with_equal_insides():
    """Whatever is inside of them: another value, another name, and nothing at all tell apart."""
    same = {f"{i}/attention/out": "a" for i in range(5)} | {f"{i}/mlp": "b" for i in range(5)}
    layers = {**same, "1/mlp": "c", "2/more": "d", "3": "e"}
    assert [f"{'  ' * line.depth}{line.name}" for line in tree_lines(layers)] == [
        *("{0,4}", "  attention", "    out", "  mlp"),
        *("1", "  attention", "    out", "  mlp"),
        *("2", "  attention", "    out", "  mlp", "  more"),
        *("3", "  attention", "    out", "  mlp"),
    ]
