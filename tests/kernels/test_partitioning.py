"""Partitioned functions give the same small integers however arrays lie on devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jfp8.kernels.partitioning import divided, divided_sum

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
BF16, F32 = jnp.bfloat16, jnp.float32
COLLECTIVES = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def on_devices(f, arrays, specs, out=None):
    """What `f` gives of arrays that lie as `specs` say, with the names of its collectives."""
    place = lambda spec: None if spec is None else NamedSharding(MESH, spec)
    arrays = [jax.device_put(x, place(spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(f, out_shardings=place(out)).lower(*arrays).compile()
    found = re.findall(rf"= .*? ({COLLECTIVES})(?:-start)?\(", compiled.as_text())
    return compiled(*arrays), found


def times_transposed(a, b):
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())))


def amax_along(x, axis=None):
    """In integers, as the kernels do: a maximum of floats may lose a NaN on this CPU."""
    bits = lax.bitcast_convert_type(abs(x), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis), jnp.float32)


product = divided("product", times_transposed, "i k, j k -> i j", combine="sum")


@pytest.mark.parametrize(
    ("a", "b", "out", "exchanged"),
    [
        (P("data"), P("model"), None, []),
        (P(None, "data"), P(None, "data"), None, ["all-reduce"]),
        (P("data", "model"), P(None, "model"), None, ["all-reduce"]),
        (P("data"), P(None, "data"), None, ["all-gather"]),  # the smaller operand is gathered
        (P("data"), P("data"), None, ["all-gather"]),
        (P(("data", "model")), P(None, "model"), None, ["all-gather"]),
        (P(), P(), P("data", "model"), []),  # each device computes what it shall have
    ],
)
def test_a_product_of_divided_operands(a, b, out, exchanged):
    x, w = integers(64, 128), integers(32, 128, seed=1)
    y, collectives = on_devices(product, (x, w), (a, b), out)
    np.testing.assert_array_equal(y, x @ w.T)
    assert collectives == exchanged


@pytest.mark.parametrize(
    ("b", "exchanged"),
    [(P(None, "data"), ["all-gather"]), (P("model"), []), (P("model", "data"), ["all-gather"])],
)
def test_a_transpose_is_sent_instead_of_an_operand_and_serves_both(b, exchanged):
    """The first product would have to send `b`, and the second one sends ``b.T`` anyway."""
    multiply = lambda a, b, b_t: times_transposed(a, b)
    forward = divided("product", multiply, "i k, j k, (k j) -> i j", combine="sum")
    x, w = integers(512, 128), integers(32, 128, seed=1)

    def both(x, w, w_t):
        y = forward(x, w, w_t)
        return y, product(y, w_t)

    specs = P("data"), b, P(*reversed((*b, None)[:2]))
    (y, dx), collectives = on_devices(both, (x, w, w.T), specs)
    np.testing.assert_array_equal(y, x @ w.T)
    np.testing.assert_array_equal(dx, x @ w.T @ w)
    assert [c for c in collectives if c != "all-reduce"] == exchanged  # sums over "model"


def test_parts_of_sequences_are_sent_once_for_a_product_and_its_gradient():
    """Both take a transpose: the forward product of what is sent to the other."""
    contract = lambda *dims: lambda a, b, *_: lax.dot_general(a, b, (dims, ((), ())))
    forward = divided("y", contract((2,), (1,)), "b s k, n k, (k b s) -> b s n", combine="sum")
    rule = "k b s, n b s -> k n"
    gradient = divided("dw", contract((1, 2), (1, 2)), rule, combine="sum")
    x, w = integers(2, 64, 32), integers(8, 32, seed=1)

    laid = lambda x, *spec: lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))

    def both(x, x_t, w):
        y = laid(forward(x, w, x_t), "data", None, "model")
        return y, laid(gradient(x_t, y.transpose(2, 0, 1)), None, "model")

    specs = P("data", "model"), P(None, "data", "model"), P("model")
    (y, dw), collectives = on_devices(both, (x, x.transpose(2, 0, 1), w), specs)
    np.testing.assert_array_equal(y, x @ w.T)
    np.testing.assert_array_equal(dw, np.einsum("bsk,bsn->kn", x, x @ w.T))
    assert collectives == ["all-gather", "all-reduce"]  # x, and sums over "data"


def test_parts_of_a_sum_in_another_dtype():
    """One device gives an exact sum; several send their parts in bf16, which has 8 bits."""

    def in_dtype(dtype, a, b):
        return times_transposed(a, b).astype(dtype)

    mixed = divided_sum("product", in_dtype, "i k, j k -> i j", np.dtype(F32), np.dtype(BF16))
    x, w = 40 * integers(64, 128), integers(32, 128, seed=1)
    halves = [x[:, :64] @ w[:, :64].T, x[:, 64:] @ w[:, 64:].T]
    first, second = (np.asarray(half, BF16).astype(np.float32) for half in halves)
    for specs, out, expected, exchanged in (
        ((P("data"), P("model")), None, x @ w.T, []),
        ((P(None, "data"),) * 2, None, np.asarray(first + second, BF16), ["all-reduce"]),
        ((P(None, "data"),) * 2, P("data"), np.asarray(first + second, BF16), ["reduce-scatter"]),
    ):
        y, collectives = on_devices(mixed, (x, w), specs, out)
        assert y.dtype == F32
        np.testing.assert_array_equal(y, expected.astype(np.float32))
        assert collectives == exchanged
    assert np.any(x @ w.T != first + second)


def quantities(x, largest=amax_along):
    """Results that follow rows, columns, blocks of 32 columns, or all elements."""
    blocks = x.reshape(len(x), -1, 32)
    return x, x.T, largest(x), largest(x, 0), largest(blocks, 2).T


def exact(x):
    """The same by numpy."""
    return quantities(x, lambda x, axis=None: np.max(abs(x), axis))


of_one = divided("quantities", quantities, "i j -> i j, j i, , j, j/32 i", combine="max")


@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P(("model", "data"))], ids=str)
@pytest.mark.parametrize("value", [100.0, np.inf, -np.inf, np.nan])
def test_maxima_of_all_devices(spec, value):
    x = integers(64, 128)
    x[3, 70] = value
    found, _ = on_devices(of_one, (x,), (spec,))
    for a, b in zip(found, exact(x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_result_in_its_own_way():
    """Two numbers, of which all devices find the first alike, and the second is a maximum."""

    def numbers(x, y):
        return y * 2, jnp.stack([amax_along(x), amax_along(x[:, :1])])

    f = divided("numbers", numbers, "i J, ONE -> ONE, TWO", combine=("alike", "max"))
    x, y = integers(64, 128), np.float32([3])
    found, collectives = on_devices(f, (x, y), (P("data"), P()))
    assert found[0] == 6
    np.testing.assert_array_equal(found[1], [abs(x).max(), abs(x[:, 0]).max()])
    assert collectives == ["all-reduce"]


@pytest.mark.parametrize(
    ("way", "exchanged"), [("max", ["all-reduce"]), ("max later", ["all-gather"] * 2)]
)
def test_maxima_of_arrays_on_different_axes_are_exchanged_together(way, exchanged):
    """Among all devices, so that XLA merges all-reduces; on GPUs it also merges all-gathers."""

    def largest_bits(x):
        bits = lax.bitcast_convert_type(abs(x), jnp.int32)
        return x, jnp.max(bits.reshape(-1, 4), axis=0)

    f = divided("largest", largest_bits, "i j -> i j, PART", combine=("alike", way))
    x, y = integers(64, 128), 7 * integers(64, 128, seed=1)
    x[3, 70] = np.nan
    specs = P("data"), P(None, "model")
    found, collectives = on_devices(lambda x, y: (f(x)[1], f(y)[1]), (x, y), specs)
    assert collectives == exchanged
    for bits, array in zip(found, (x, y), strict=True):
        by_part = np.max(abs(array).view(np.int32).reshape(-1, 4), axis=0)
        np.testing.assert_array_equal(bits, by_part)


def test_a_block_is_not_cut():
    """Four blocks on eight devices: each has half a block, or all are put together first."""
    x = integers(64, 128) * np.arange(1, 129, dtype=np.float32)  # no two columns alike
    what = "quantities: a dimension of 128 is divided into 8 parts, which cuts blocks of 32"
    with pytest.warns(UserWarning, match=what):
        found, collectives = on_devices(of_one, (x,), (P(None, ("data", "model")),))
    for a, b in zip(found, exact(x), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "all-gather" in collectives


def test_incomplete_blocks_stay_whole():
    """There is no rule for 72 columns in blocks of 32, so a device has all columns."""

    def rows(x):
        blocks = jnp.pad(abs(x), ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
        return x, jnp.max(blocks, 2)

    x = integers(16, 72)
    f = divided("rows", rows, "i j -> i j, i j/32")
    with pytest.warns(UserWarning, match="72 is divided into 4 parts, which cuts blocks of 32"):
        found, _ = on_devices(f, (x,), (P("data", "model"),))
    for a, b in zip(found, rows(jnp.asarray(x)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_under_vmap_scan_grad_and_remat():
    x, w = integers(4, 64, 128), integers(4, 32, 128, seed=1)
    specs = P("model", None, "data"), P(None, None, "data")
    y, collectives = on_devices(jax.vmap(product), (x, w), specs)
    np.testing.assert_array_equal(y, np.einsum("bik,bjk->bij", x, w))
    assert "all-reduce" in collectives
    y, _ = on_devices(
        jax.vmap(product, in_axes=(0, None)), (x, w[0]), (P(None, "data"), P("model"))
    )
    np.testing.assert_array_equal(y, np.einsum("bik,jk->bij", x, w[0]))

    def summed(x, w):
        step = jax.checkpoint(lambda carry, xw: (carry + product(*xw), None))
        return lax.scan(step, jnp.zeros((64, 32)), (x, w))[0]

    y, _ = on_devices(summed, (x, w), (P(None, "data"), P(None, "model")))
    np.testing.assert_array_equal(y, np.einsum("bik,bjk->ij", x, w))


@pytest.mark.parametrize("sizes", [(2, 4), (8, 1)])
def test_inside_of_shard_map_over_one_axis_of_two(sizes):
    """The other may be divided by the compiler, which knows how to divide this function."""
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, w = integers(64, 128), integers(32, 128, seed=1)
    f = jax.shard_map(
        lambda x, w: divided("product", times_transposed, "i k, j k -> i j", combine="sum")(x, w),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
    )
    w = jax.device_put(w, NamedSharding(mesh, P("model")))
    np.testing.assert_array_equal(jax.jit(f)(x, w), x @ w.T)


def test_most_arrays_decide_which_dimension_an_axis_divides():
    """Parts of sequences are gathered for a weight that is divided as its results are."""
    rows = lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((), ())))
    of_sequences = divided("product", rows, "b s k, n k -> b s n", combine="sum")
    x, w = integers(2, 64, 32), integers(8, 32, seed=1)
    specs = (P("data", "model"), P("model")), P("data", None, "model")
    y, exchanged = on_devices(of_sequences, (x, w), *specs)
    np.testing.assert_array_equal(y, x @ w.T)
    assert exchanged == ["all-gather"]


def test_what_becomes_of_parts_must_be_said():
    with pytest.raises(AssertionError, match="product: a result lacks dimensions"):
        divided("product", times_transposed, "i k, j k -> i j")


def test_eagerly_and_on_one_device_it_is_the_function():
    x, w = integers(6, 5), integers(3, 5, seed=1)
    np.testing.assert_array_equal(product(x, w), x @ w.T)
    text = jax.jit(product).lower(x, w).compile().as_text()
    assert "custom-call" not in text


def test_programs_of_other_functions_differ_without_the_address_of_a_rule():
    """All that JAX's compilation cache sees if it is told to ignore that address."""

    def text(name, rule="i k, j k -> i j"):
        x = jax.device_put(integers(64, 128), NamedSharding(MESH, P("data")))
        lowered = jax.jit(divided(name, times_transposed, rule, combine="sum")).lower(x, x)
        return re.sub('backend_config = "[0-9]*"', "", lowered.as_text())

    assert text("product") == text("product") != text("product, fast")
    assert "CustomSPMDPartitioning" in text("product")
    assert text("product") != text("product", "i k, j k -> j i")
