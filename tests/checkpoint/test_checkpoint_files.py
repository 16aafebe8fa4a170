"""Checkpoints come back bit for bit, from both formats, and bad ones not at all."""

import gc
import json
import math
import os
import pickle
import shutil
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import NamedSharding, PartitionSpec

import jfp8
from jfp8 import checkpoint
from jfp8.checkpoint.state_dict import DTYPES
from jfp8.optim.adam import adam
from jfp8.optim.masters import master_weights
from jfp8.recipes.block_scaling import MXFP8BlockScaling
from jfp8.recipes.nvfp4 import NVFP4BlockScaling

FILE, FOLDER = "x.safetensors", "x"
each_format = pytest.mark.parametrize("name", [FILE, FOLDER], ids=["safetensors", "orbax"])


@pytest.fixture(autouse=True)
def needs_orbax(request) -> None:
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("name") == "x":
        pytest.importorskip("orbax.checkpoint")


# Every state, with random bits in all of its arrays: NaNs with payloads, subnormals, signed zeros


def random_bits(struct: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    dtype, shape = np.dtype(struct.dtype), struct.shape
    unused = {"bool": 7, "float4_e2m1fn": 4, "float6_e2m3fn": 2, "float6_e3m2fn": 2}
    unused |= {"int4": 4, "uint4": 4, "int2": 6, "uint2": 6}
    codes = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return (codes >> unused.get(dtype.name, 0)).view(dtype).reshape(shape)


def filled(make: Callable[[], Any]) -> Any:
    """What `make` makes, with other arrays; nothing is compiled for it."""
    rng = np.random.default_rng(0)

    def array(path: Any, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(rng.integers(0, 2**32, (*leaf.shape, 2), np.uint32))
        bits = random_bits(leaf, rng)
        if "fp8" in jax.tree_util.keystr(path):  # an amax is finite and not negative
            return np.asarray(bits.view(np.uint32) & np.uint32(0x7F7FFFFF)).view(np.float32)
        return bits

    return jax.tree_util.tree_map_with_path(array, jax.eval_shape(make))


X = jnp.ones((2, 64))


def train_state() -> Any:
    """FP8 weights with masters, histories, a loss scale, and moments in expanded blocks."""
    model = nn.Sequential([jfp8.Dense(64), nn.tanh, jfp8.Dense(8)])
    variables = model.init(jax.random.key(0), X)
    variables = {**variables, "params": jfp8.quantize_params(variables["params"])}
    tx = master_weights(adam(1e-3, preset="coat"), "float16_scaled")
    tx = optax.chain(jfp8.loss_scale(), tx)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([jfp8.nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.dropout(self.layers[0](x)))


def nnx_states() -> Any:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jfp8.optim.adamw(1e-3), wrt=nnx.Param)
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}


def scaled_arrays() -> Any:
    x = jnp.ones((6, 64))
    granularities = [jfp8.PerTensor(), jfp8.PerAxis(0), jfp8.Block((2, 32)), jfp8.Block((4, 48))]
    return {
        **{f"{g}": jfp8.quantize(x, granularity=g) for g in granularities},
        **{f.name: jfp8.quantize(x, f) for f in (jfp8.E5M2, jfp8.E3M4, jfp8.E2M1FN)},
        "mx": jfp8.quantize_params({"kernel": x}, MXFP8BlockScaling()),
        "two levels": jfp8.quantize_params({"kernel": x}, NVFP4BlockScaling()),
    }


def expected_state(tree: Any) -> Any:
    """What a file should hold, from Flax's own functions."""
    if isinstance(tree, nnx.State):
        return expected_state(nnx.to_pure_dict(tree))
    found = serialization.to_state_dict(tree)
    if isinstance(found, dict):
        return {str(key): expected_state(value) for key, value in found.items()}
    if isinstance(found, jax.Array) and jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(found))
    return found


def by_path(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {p: leaf for k, v in tree.items() for p, leaf in by_path(v, (*path, k)).items()}


def assert_same_bits(found: Any, expected: Any) -> None:
    found, expected = by_path(found), by_path(expected)
    assert found.keys() == expected.keys()
    for path, wanted in expected.items():
        leaf = found[path]
        if isinstance(wanted, np.ndarray | np.generic | jax.Array):
            wanted = np.asarray(wanted)
            assert type(leaf) is np.ndarray, path
            assert (leaf.dtype, leaf.shape) == (wanted.dtype, wanted.shape), path
            assert leaf.tobytes() == wanted.tobytes(), path
        else:
            assert type(leaf) is type(wanted), path
            assert leaf == wanted or (leaf != leaf and wanted != wanted), path


@each_format
@pytest.mark.parametrize("make", [train_state, nnx_states, scaled_arrays])
def test_every_state_comes_back_bit_for_bit(directory, make, name):
    tree = filled(make)
    checkpoint.save(directory / name, tree)
    saved = checkpoint.load(directory / name)
    arrays = [leaf for leaf in by_path(saved).values() if isinstance(leaf, np.ndarray)]
    assert len(arrays) >= 4
    assert all(array.flags.writeable for array in arrays)
    assert_same_bits(saved, expected_state(tree))
    restored = checkpoint.restore(directory / name, tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert_same_bits(expected_state(restored), expected_state(tree))


def every_dtype(dtypes: list[str]) -> dict[str, Any]:
    """All bit patterns of 8 and 16 bits, and random ones of more."""
    rng = np.random.default_rng(1)
    found = {}
    for dtype in dtypes:
        struct = jax.ShapeDtypeStruct((256, 256), DTYPES[dtype])
        array = random_bits(struct, rng)
        if array.itemsize <= 2:
            patterns = np.arange(256 * 256).astype(f"uint{8 * array.itemsize}")
            if dtype in ("float16", "bfloat16", "int16", "uint16"):
                array = patterns.view(array.dtype).reshape(256, 256)
        found[dtype] = array
    return found


UNKNOWN = {
    "x.safetensors": ["complex128"],
    "x": ["float6_e2m3fn", "float6_e3m2fn", "float8_e4m3", "uint4", "uint2"],
}


@each_format
def test_every_dtype_comes_back_bit_for_bit(directory, name):
    tree = every_dtype([dtype for dtype in DTYPES if dtype not in UNKNOWN[name]])
    checkpoint.save(directory / name, tree)
    assert_same_bits(checkpoint.load(directory / name), tree)
    for dtype in UNKNOWN[name]:
        with pytest.raises(ValueError, match=dtype):
            checkpoint.save(directory / f"other_{name}", {"a": np.zeros(2, DTYPES[dtype])})
    assert [entry.name for entry in directory.iterdir()] == [name]


@each_format
def test_what_is_no_array_comes_back(directory, name):
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    tree = {
        "sharded": jax.device_put(jnp.arange(64.0), NamedSharding(mesh, PartitionSpec("data"))),
        "nothing": {},
        "deep": {"er": ({}, (), [1, 2.5, True, None, "a/b", -0.0, math.inf, math.nan])},
        "numbers": [np.float32(2.5), np.zeros((), np.int8), 2**63, -(2**63), jnp.bfloat16(3)],
        "text": "ÄÖ \x00 \U0001f600 \" \\ '",
        "ä 'quoted' \"name\"": np.ones(3, np.float32),
        "": {"": np.ones(1)},
        "big endian": np.arange(3, dtype=">i4"),
        "strided": [fortran, fortran[:, ::2], np.broadcast_to(np.float32(1), (2, 2))],
        "odd": [np.ones((2, 3), ml_dtypes.float4_e2m1fn), np.ones((), ml_dtypes.float4_e2m1fn)],
    }
    if name != "x":
        tree["empty"] = [np.zeros((0, 3), np.float32), np.zeros((2, 0), ml_dtypes.float8_e5m2)]
    if name == "x":  # int64 is what Orbax makes of an int
        tree["numbers"][2:4] = [2**62, -(2**62)]
    checkpoint.save(directory / name, tree)
    tree["big endian"] = np.arange(3, dtype="int32")
    assert_same_bits(checkpoint.load(directory / name), expected_state(tree))


STANDARD_NAMES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bool": "BOOL",
    "complex64": "C64",
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
}


def test_the_safetensors_library_reads_what_is_written_and_the_other_way_round(directory):
    """In FP8, too, which its own loader for numpy refuses: KeyError 'F8_E4M3'."""
    safetensors = pytest.importorskip("safetensors")
    tree = {"layer": every_dtype(list(STANDARD_NAMES)), "codes": np.ones(3, jnp.float8_e3m4)}
    checkpoint.save(directory / "x.safetensors", tree)
    found = dict(safetensors.deserialize((directory / "x.safetensors").read_bytes()))
    assert found.keys() == {"codes", *(f"layer/{dtype}" for dtype in STANDARD_NAMES)}
    for dtype, name in STANDARD_NAMES.items():
        entry, array = found[f"layer/{dtype}"], tree["layer"][dtype]
        assert (entry["dtype"], entry["shape"]) == (name, [256, 256])
        assert bytes(entry["data"]) == array.tobytes()
    assert (found["codes"]["dtype"], bytes(found["codes"]["data"])) == ("U8", b"\x30\x30\x30")
    library = pytest.importorskip("safetensors.numpy")
    flat = {f"model.layer.{name}": array for name, array in tree["layer"].items()}
    library.save_file(flat, directory / "theirs.safetensors", metadata={"format": "pt"})
    assert_same_bits(checkpoint.load(directory / "theirs.safetensors"), flat)


def test_two_fp4_elements_in_a_byte(directory):
    """The layout of PyTorch's float4_e2m1fn_x2, whose names have F4: the first in the low half."""
    x = np.array([[0.5, 6.0, -1.0, 0.0]], np.float32).astype(ml_dtypes.float4_e2m1fn)
    checkpoint.save(directory / "x.safetensors", {"x": x})
    content = (directory / "x.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["x"] == {"dtype": "F4", "shape": [1, 4], "data_offsets": [0, 2]}
    assert content[-2:] == bytes([0x71, 0x0A])  # 0.5 = 1, 6 = 7; -1 = 10, 0 = 0
    assert_same_bits(checkpoint.load(directory / "x.safetensors"), {"x": x})


def test_orbax_reads_what_is_written_and_the_other_way_round(directory):
    ocp = pytest.importorskip("orbax.checkpoint")
    state = filled(train_state)
    checkpoint.save(directory / "ours", state)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), serialization.to_state_dict(state)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(directory / "ours", wanted)
        assert_same_bits(jax.tree.map(np.asarray, restored), serialization.to_state_dict(state))
        checkpointer.save(directory / "theirs", jax.tree.map(jnp.asarray, state))
    restored = checkpoint.restore(directory / "theirs", state)
    assert_same_bits(expected_state(restored), expected_state(state))


# Bad checkpoints. Whatever they are: a ValueError that names the file, and little memory.

SMALL = {
    "params": {
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "stored": {"data": np.ones((2, 2), jnp.float8_e4m3fn), "scale": np.float32(0.5)},
        "codes": np.ones(3, ml_dtypes.float8_e3m4),
        "packed": np.ones(4, ml_dtypes.float4_e2m1fn),
    },
    "step": 7,
    "empty": {},
}


@cache
def small_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save(Path(directory) / FILE, SMALL)
        return (Path(directory) / FILE).read_bytes()


def refusal(path: Path, expected: Any) -> str | None:
    """Return the error of `load`; None if it loads, and then it is `expected`."""
    try:
        loaded = checkpoint.load(path)
    except ValueError as error:
        return checked(str(error), path)
    assert_same_bits(loaded, expected_state(expected))  # a space became a tab, or so
    return None


def checked(message: str, path: Path) -> str:
    assert str(path) in message
    assert len(message) < 3000
    return message


def refusals(path: Path, contents: Iterable[bytes]) -> Iterator[str | None]:
    """Yield what `load` says of a file with each of `contents`; `SMALL` is allowed."""
    for content in contents:
        path.write_bytes(content)
        yield refusal(path, SMALL)


def test_every_truncation_is_refused(directory):
    content = small_file()
    bad = [*(content[:end] for end in range(len(content))), content + b"\0"]
    assert None not in list(refusals(directory / FILE, bad))


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_every_flipped_bit_of_a_safetensors_file_is_refused_or_changes_nothing(directory):
    """Of header and data; what changes nothing is white space that became other white space."""
    content = small_file()
    bad = (flipped(content, bit) for bit in range(8 * len(content)))
    assert list(refusals(directory / FILE, bad)).count(None) <= 10


def tensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def single(*entry: Any, metadata: Any = None, **more: Any) -> bytes:
    """A file with one array of one byte, "a"."""
    before = {} if metadata is None else {"__metadata__": metadata}
    return tensors({**before, "a": tensor(*entry, **more)}, b"\0")


def ours(value: Any) -> dict[str, str]:
    text = json.dumps(value)
    return {"jfp8": text, "jfp8_crc32": str(zlib.crc32(text.encode()))}


def hidden(dtypes: Any, stored: str = "U8") -> bytes:
    return single(stored, metadata=ours({"dtypes": dtypes}))


def entries(*values: Any) -> bytes:
    """A header with one tensor for each of `values`, in JSON that has the same name twice."""
    return b"{" + b",".join(b'"a":' + json.dumps(v).encode() for v in values) + b"}"


BAD_TENSORS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes"),
    "seven bytes": (b"\x00" * 7, "7 bytes"),
    "header of 16 exabytes": (tensors({}, length=2**64 - 1), "fewer than its header"),
    "no text": (tensors(b'{"\xff":{}}'), "not JSON"),
    "a list": (tensors([]), "not a dict"),
    "nested too deep": (tensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "too deep"),
    "a number of many digits": (tensors(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON"),
    "name twice": (tensors(entries(tensor(), tensor()), b"\0"), "'a' occurs twice"),
    "entry that is no dict": (tensors({"a": 1}), "not a dict of dtype"),
    "more than three fields": (single(x=1), "not a dict of dtype"),
    "dtype that is a list": (single(["U8"]), "is unknown"),
    "objects of Python": (single("O"), "dtype 'O' is unknown"),
    "sizes that are none": (single(shape=[-1, True]), "not a list of sizes"),
    "shape that is text": (single(shape="1"), "not a list of sizes"),
    "65 dimensions": (single(shape=[1] * 65), "65 dimensions"),
    "shape of 2^100 bytes": (single(shape=[2**50, 2**50]), "does not match 1 bytes"),
    "empty but absurd": (tensors({"a": tensor(shape=[0, 2**70], offsets=[0, 0])}), "a"),
    "half a byte": (tensors({"a": tensor("F4", shape=[3], offsets=[0, 2])}, b"\0\0"), "not match"),
    "one offset": (single(offsets=[0]), "not two ints"),
    "data of 2^60 bytes": (single(shape=[2**60], offsets=[0, 2**60]), "bytes 0 to"),
    "data that ends before it begins": (single(shape=[0], offsets=[1, 0]), "bytes 1 to 0"),
    "data before the file": (single(offsets=[-1, 0]), "bytes -1 to 0"),
    "data of two arrays overlaps": (
        tensors({"a": tensor(shape=[2], offsets=[0, 2]), "b": tensor(offsets=[1, 2])}, b"\0\0"),
        "what comes before ends at 2",
    ),
    "a hole": (
        tensors({"a": tensor(), "b": tensor(offsets=[2, 3])}, b"\0\0\0"),
        "what comes before ends at 1",
    ),
    "data of nobody": (tensors({"a": tensor()}, b"\0PK\x03\x04"), "4 bytes of its data belong"),
    "array below an array": (
        tensors({"a": tensor(), "a/b": tensor(offsets=[1, 2])}, b"\0\0"),
        "entries below it",
    ),
    "a thousand levels": (tensors({"/".join("a" * 1000): tensor()}, b"\0"), "nested deeper"),
    "bool that is neither": (tensors({"a": tensor("BOOL")}, b"\2"), "no bool"),
    "metadata that is a list": (tensors({"__metadata__": []}), "not a dict of strings"),
    "our metadata without checksum": (tensors({"__metadata__": {"jfp8": "{}"}}), "damaged"),
    "our metadata is no JSON": (
        tensors({"__metadata__": {"jfp8": "{", "jfp8_crc32": str(zlib.crc32(b"{"))}}),
        "not JSON",
    ),
    "our metadata is a list": (tensors({"__metadata__": ours([])}), "not a dict"),
    "nodes are a list": (tensors({"__metadata__": ours({"nodes": [1]})}), "not a dict"),
    "a node is a list": (tensors({"__metadata__": ours({"nodes": {"a": [1]}})}), "neither"),
    "node and array": (single(metadata=ours({"nodes": {"a": 1}})), "occurs twice"),
    "hidden dtype is unknown": (hidden({"a": "object"}), "its dtype in __metadata__ is 'object'"),
    "hidden dtype over a real one": (hidden({"a": "int4"}, "I8"), "its dtype in __metadata__"),
    "checksum of no array": (single(metadata=ours({"crc32": {"a": 0, "b": 0}})), "'b'"),
    "a pickle": (pickle.dumps({"a": 1}), "fewer than its header"),
}


def test_bad_files_are_refused_before_memory_is_taken(directory):
    path = directory / FILE
    tracemalloc.start()
    try:
        for attack, (content, says) in BAD_TENSORS.items():
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises(ValueError, match=says) as caught:
                checkpoint.load(path)
            _, peak = tracemalloc.get_traced_memory()
            checked(str(caught.value), path)
            assert peak - before < 2**20 + 40 * len(content), attack
    finally:
        tracemalloc.stop()


# Orbax has checksums of numbers and of arrays of some bytes, but none of larger ones and strings.
LARGE = {**SMALL, "large": np.sin(np.arange(1024, dtype=np.float32)), "name": "a run"}


def damaged(content: bytes) -> Iterator[bytes]:
    """Cut off at some places, and with one of some bits flipped."""
    yield from (content[:end] for end in {0, len(content) // 2, len(content) - 1})
    yield b"[" * 100_000
    for bit in range(0, 8 * len(content), 8 * len(content) // 10 or 1):
        yield flipped(content, bit)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's threads
def test_every_damage_to_a_folder_is_refused_or_changes_nothing(directory):
    """Nothing changes where Orbax does not look, as in the times in its metadata."""
    pytest.importorskip("orbax.checkpoint")
    checkpoint.save(directory / "x", LARGE)
    files = sorted(file for file in (directory / "x").rglob("*") if file.is_file())
    assert len(files) >= 6
    refused = 0
    for file in files:
        for bad in damaged(file.read_bytes()):
            shutil.rmtree(directory / "copy", ignore_errors=True)
            copy = shutil.copytree(directory / "x", directory / "copy")
            (copy / file.relative_to(directory / "x")).write_bytes(bad)
            refused += refusal(copy, LARGE) is not None
    assert refused > 50
    gc.collect()


def test_folders_that_are_traps(directory):
    pytest.importorskip("orbax.checkpoint")
    checkpoint.save(directory / "x", SMALL)
    outside = directory / "outside"
    outside.write_bytes(b"secret")
    link = lambda to: lambda path: path.symlink_to(to)
    for i, make_trap in enumerate((link(outside), link(directory), os.mkfifo)):
        trap = shutil.copytree(directory / "x", directory / f"trap{i}")
        make_trap(trap / "entry")
        assert "neither a file nor a folder" in refusal(trap, SMALL)
    (directory / "empty").mkdir()
    assert "with a tree. There is none in its folders" in refusal(directory / "empty", SMALL)
    (directory / "file").write_bytes(b"")
    assert "is a file" in refusal(directory / "file", SMALL)


def test_a_folder_that_claims_more_than_the_memory(directory):
    """Parts of an array that are not there read as zeros, so that any size can be claimed."""
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    ) as checkpointer:
        checkpointer.save(directory / "x", {"a": np.ones((4, 4), np.float32)})
    assert_same_bits(checkpoint.load(directory / "x"), {"a": np.ones((4, 4), np.float32)})
    (description,) = (directory / "x").rglob(".zarray")
    claim = json.loads(description.read_text()) | {"shape": [2**40, 2**10]}
    description.write_text(json.dumps(claim))
    assert f"its arrays take {2**52} bytes" in refusal(directory / "x", SMALL)


def test_another_suffix_lists_those_that_there_are(directory):
    for name in ("x.npz", "x.pt", "x.ckpt", "x.pkl", "x.0", "x.msgpack", "x.safetensors.gz"):
        with pytest.raises(ValueError, match=r"Allowed: \*\.safetensors, and a name without"):
            checkpoint.save(directory / name, SMALL)
        with pytest.raises(ValueError, match=r"Allowed: \*\.safetensors, and a name without"):
            checkpoint.load(name)
    assert not list(directory.iterdir())


@each_format
def test_no_checkpoint(directory, name):
    with pytest.raises(FileNotFoundError, match=name):
        checkpoint.load(directory / name)


@each_format
def test_trees_that_cannot_be_saved(directory, name):
    path = directory / name
    checkpoint.save(path, SMALL)
    deep: Any = 1
    for _ in range(150):
        deep = {"a": deep}
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    for tree, error, message in (
        (np.ones(3), TypeError, r"but got ndarray.*save\(path, \{\"x\": x\}\)"),
        (Net(nnx.Rngs(0)), TypeError, r"nnx\.state\(model\)"),
        ({"a": {}, "b": ()}, ValueError, "nothing to save"),
        ({"a": {"b": object()}}, TypeError, "'a/b' is of type object.*register_serialization"),
        ({"a": shape}, TypeError, "'a' is of type ShapeDtypeStruct"),
        ({"a": np.array(["x"])}, TypeError, "'a' is an array of <U1"),
        ({"a": np.array([print], object)}, TypeError, "'a' is an array of object"),
        ({"a": 2**64}, ValueError, "'a' = 18446744073709551616 has more than the 64 bits"),
        (deep, ValueError, "nested deeper than 100"),
    ):
        with pytest.raises(error, match=message):
            checkpoint.save(path, tree)
    expected = expected_state(SMALL)
    assert_same_bits(checkpoint.load(path), expected)
    assert [entry.name for entry in directory.iterdir()] == [name]


def test_names_that_a_format_does_not_hold(directory):
    x = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="keys joined by '/'"):
        checkpoint.save(directory / "x.safetensors", {"a/b": x})
    with pytest.raises(ValueError, match="'__metadata__' is taken"):
        checkpoint.save(directory / "x.safetensors", {"__metadata__": x})
    pytest.importorskip("orbax.checkpoint")
    checkpoint.save(directory / "slash", {"a/b": x, "__metadata__": x})
    assert_same_bits(checkpoint.load(directory / "slash"), {"a/b": x, "__metadata__": x})
    with pytest.raises(ValueError, match=r"'a/b' and 'a\.b' under one name"):
        checkpoint.save(directory / "x", {"a": {"b": x}, "a.b": 2 * x})
    with pytest.raises(ValueError, match=r"'a' is float32\[0\], which Orbax cannot store"):
        checkpoint.save(directory / "x", {"a": x[:0]})


def test_a_folder_is_never_replaced(directory):
    pytest.importorskip("orbax.checkpoint")
    (directory / "work").mkdir()
    (directory / "work" / "thesis.tex").write_bytes(b"years")
    with pytest.raises(ValueError, match=r"exists.*such as work_200, or let .*CheckpointManager"):
        checkpoint.save(directory / "work", SMALL)
    (directory / FILE).mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        checkpoint.save(directory / FILE, SMALL)
    assert (directory / "work" / "thesis.tex").read_bytes() == b"years"


def test_a_link_stays_a_link(directory):
    checkpoint.save(directory / "new" / "folder" / "real.safetensors", SMALL)
    (directory / "link.safetensors").symlink_to(directory / "new" / "folder" / "real.safetensors")
    checkpoint.save(directory / "link.safetensors", {"a": 1})
    assert (directory / "link.safetensors").is_symlink()
    assert checkpoint.load(directory / "new" / "folder" / "real.safetensors") == {"a": 1}


def test_without_orbax_it_says_what_to_install(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'jfp8\[checkpoint\]'"):
        checkpoint.save(directory / "x", SMALL)
    (directory / "x").mkdir()
    with pytest.raises(ImportError, match=r"pip install 'jfp8\[checkpoint\]'"):
        checkpoint.load(directory / "x")
    checkpoint.save(directory / FILE, SMALL)
    assert_same_bits(checkpoint.load(directory / FILE), expected_state(SMALL))


def test_restore_is_load_and_upgrade(directory):
    layer, x = jfp8.Dense(4), jnp.ones((1, 3))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)  # shapes will do
    kernel = np.arange(12, dtype=np.float32).reshape(3, 4)
    saved = {"params": {"kernel": kernel, "bias": np.ones(4, np.float32)}}
    checkpoint.save(directory / FILE, saved)
    with pytest.warns(checkpoint.CheckpointChange, match="start empty"):
        restored = checkpoint.restore(directory / FILE, variables)
    np.testing.assert_array_equal(restored["params"]["kernel"], kernel)
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert shapes(restored) == shapes(variables)
    with pytest.raises(ValueError, match="fp8"):
        checkpoint.restore(directory / FILE, variables, strict=True)
    checkpoint.save(directory / FILE, {"params": {"kernel": kernel.T, "bias": kernel[0]}})
    with pytest.raises(ValueError, match="params/kernel"):
        checkpoint.restore(directory / FILE, variables)


def test_arrays_of_safetensors_are_aligned_for_whoever_maps_the_file(directory):
    """The format's own rule: elements of n bytes start at multiples of n."""
    tree = {"a": np.ones(3, np.uint8), "b": np.ones(5, np.float16), "c": np.ones(2, np.float64)}
    checkpoint.save(directory / "x.safetensors", tree)
    content = (directory / "x.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name, array in tree.items():
        begin, end = header[name]["data_offsets"]
        assert (start + begin) % array.itemsize == 0
        assert content[start + begin : start + end] == array.tobytes()
