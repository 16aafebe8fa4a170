"""The lines of a tree of layers, against ones that are written down."""

from __future__ import annotations

import pytest

from jfp8.conversion.layer_tree import tree_lines


def drawn(layers):
    return [f"{'  ' * line.depth}{line.name}" for line in tree_lines(layers)]


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
    assert drawn({f"block_{n}": "same" for n in numbers}) == [name]


def test_alike_are_names_that_differ_in_the_last_number_only():
    assert drawn(dict.fromkeys(["w1_a2", "w1_a3", "w2_a2", "up", "down"], 0)) == [
        "w1_a{2,3}",
        "w2_a2",
        "up",
        "down",
    ]


def test_alike_are_layers_with_equal_insides():
    """Whatever is inside of them: another value, another name, and nothing at all tell apart."""
    same = {f"{i}/attention/out": "a" for i in range(5)} | {f"{i}/mlp": "b" for i in range(5)}
    layers = {**same, "1/mlp": "c", "2/more": "d", "3": "e"}
    assert drawn(layers) == [
        *("{0,4}", "  attention", "    out", "  mlp"),
        *("1", "  attention", "    out", "  mlp"),
        *("2", "  attention", "    out", "  mlp", "  more"),
        *("3", "  attention", "    out", "  mlp"),
    ]


def test_lines_say_which_layers_they_stand_for():
    """Each layer is in one line; modules that only hold others stand for none."""
    layers = {f"e/{i}/{name}_{n}": name for i in range(2) for name in "qk" for n in range(2)}
    lines = tree_lines(layers)
    assert [(line.path, len(line.layers)) for line in lines] == [
        ("e", 0),
        ("e/{0,1}", 0),
        ("e/{0,1}/q_{0,1}", 4),
        ("e/{0,1}/k_{0,1}", 4),
    ]
    assert sorted(path for line in lines for path in line.layers) == sorted(layers)


def test_a_layer_that_holds_others_comes_before_them():
    lines = tree_lines({"mlp/up": 1, "mlp": 2, "head": 3})
    assert [(line.path, line.layers) for line in lines] == [
        ("mlp", ("mlp",)),
        ("mlp/up", ("mlp/up",)),
        ("head", ("head",)),
    ]
