"""How matrices lie on several TPUs, by the types of what they are made of."""

from __future__ import annotations

import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from jfp8.kernels.tpu.sharded import Layout, layout_of_matrices
from jfp8.products.explicit_sharding import Specs

A, B, NONE = ("a",), ("b",), ()
SHAPES = (4, 256, 1024), (1024, 512)
NUMBERS = ((2,), (0,)), ((), ())
SPECS = Specs(P("a"), P("a", "b"), P("a", None, "b"))


@pytest.fixture(autouse=True)
def mesh():
    with use_abstract_mesh(AbstractMesh((2, 4), ("a", "b"))):
        yield


def test_dimensions_that_make_up_rows():
    found = layout_of_matrices(SPECS, SHAPES, NUMBERS)
    assert found == Layout((A, NONE), (A, B), (A, B))
    over_both = SPECS._replace(rhs=P(("a", "b")))
    assert layout_of_matrices(over_both, SHAPES, NUMBERS).rhs == (A + B, NONE)
    one = (1, 256, 1024), SHAPES[1]  # a dimension of 1 is not in the way
    specs = Specs(P(None, "a"), P(), P(None, "a"))
    assert layout_of_matrices(specs, one, NUMBERS) == Layout((A, NONE), (NONE,) * 2, (A, NONE))


@pytest.mark.parametrize(
    "changed",
    [
        {"lhs": P(None, "a")},  # every fourth of the rows in two parts
        {"lhs": P("a", "b")},
        {"y": P("a", "b")},
        {"rhs": P(None, ("a", "b"))},  # 64 columns each
    ],
)
def test_parts_that_kernels_do_not_take(changed):
    assert layout_of_matrices(SPECS._replace(**changed), SHAPES, NUMBERS) is None
