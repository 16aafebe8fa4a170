"""Verdicts on kernels, made up here: planners for a GPU obey them, and say so."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jfp8
from jfp8.kernels import verdicts
from jfp8.kernels.backend import Facts
from jfp8.kernels.cost_model import work_of
from jfp8.kernels.cuda_backends import choose, quantizing_k_major, times_of
from jfp8.kernels.grouped_kernels import why_not_grouped_kernels
from jfp8.kernels.hopper.backend import BACKEND, why_no_quantizing
from jfp8.kernels.rates import RATES
from jfp8.recipes import get
from jfp8.scaling.formats import E4M3FN
from jfp8.tracing.devices import Gpu
from support.devices import needs_mosaic

H200, B200 = Gpu("NVIDIA H200", (9, 0)), Gpu("NVIDIA B200", (10, 0))
PLAIN = (((1,), (0,)), ((), ()))
CHECKED = "failed `python -m jfp8 check`"


def judge(kind, layers=None, **kernels):
    """Write a verdict, with the format that the page on GPUs shows, not by the command."""
    path = verdicts.verdict_file(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {name: {"task": task, "failure": why} for name, (task, why) in kernels.items()}
    path.write_text(json.dumps({"kernels": found, "layers": layers or {}}))
    return path


def backend(granularity="tensor", gpu=H200, fmt=E4M3FN, blocks=((0, 0), (0, 0)), **more):
    dtype = jnp.dtype(more.pop("scale", jnp.float32))
    facts = Facts(
        (fmt, fmt), (dtype, dtype), ((), ()), granularity, blocks, (4096,) * 3, "f32", **more
    )
    return choose(facts, gpu)


def test_without_a_verdict_nothing_is_left_out():
    assert backend().backend.name == "xla"
    assert not backend().refused
    ada = Gpu("NVIDIA L40S", (8, 9))
    found = [quantizing_k_major(get("current"), (m, 4096, 4096), ada, None) for m in (4096, 0)]
    assert found == [False, None]


def test_geforce_uses_mx_instructions_only_after_they_passed():
    gpu = Gpu("NVIDIA GeForce RTX 5090", (12, 0))
    assert backend(gpu=gpu).backend.name == "xla"
    judge(gpu.kind, cudnn_mx=("MX products", "wrong"))
    assert backend(gpu=gpu).backend.name == "xla"
    judge(gpu.kind, cudnn_mx=("MX products", ""))
    assert backend(gpu=gpu).backend.name == "cudnn"
    assert backend(gpu=H200).backend.name == "xla"


def test_layers_that_were_timed_correct_the_model_of_time():
    gpu, rows = Gpu("NVIDIA L40S", (8, 9)), {"granularity": "rows"}
    assert backend(gpu=gpu, **rows).backend.name == "xla"
    layers = {
        recipe: {"failure": "", "us": {"1024x1024": small, "8192x8192": large}}
        for recipe, small, large in (("bf16", 100.0, 1000.0), ("rowwise", 200.0, 2000.0))
    }
    judge(gpu.kind, layers=layers)
    assert backend(gpu=gpu, **rows).backend.name == "bf16"
    assert backend(gpu=gpu).backend.name == "xla"  # another recipe, which was not timed
    layers["rowwise"]["us"]["8192x8192"] = 250.0
    layers["block"] = {"failure": "it crashed"}
    path = judge(gpu.kind, layers=layers)
    gains = functools.partial(verdicts.measured_gains, gpu.kind)
    assert gains("rows") == {(1024, 1024): 0.5, (8192, 8192): 4.0}
    assert gains("blocks") == {}
    path.write_text("{")
    assert gains("rows") == {}


def test_a_narrow_layer_is_judged_by_its_shape_and_by_the_layers_that_were_timed():
    """Cubes as timed on an H100. The factor is taken from them, not the gain, nearer ones first."""
    gpu, rates = Gpu("NVIDIA H100 80GB HBM3", (9, 0)), RATES["H100"]
    shapes = [(1024, 1024, 1024), (8192, 8192, 8192), (3250, 3250, 3250), (32768, 1024, 1024)]

    def gains():
        found = (times_of(work_of(shape), rates, "one", gpu) for shape in shapes)
        return np.array([times.bf16 / times.fp8 for times in found])

    model = gains()
    timed = {"bf16": (19.8, 4690.0), "delayed": (42.6, 2835.0), "current": (42.2, 2945.0)}
    layers = {name: {"us": {"1024x1024": us[0], "8192x8192": us[1]}} for name, us in timed.items()}
    judge(gpu.kind, layers=layers)
    small = np.mean([19.8 / 42.6, 19.8 / 42.2])
    large = np.mean([4690 / 2835, 4690 / 2945])
    factors = np.array([model[0] / small, model[1] / large])  # by which times in FP8 are longer
    ln = lambda m, n: np.array([np.log(m * n * n) / 3, np.log(2 * m * n + n * n)])
    at = lambda m, n: ln(m, n) @ [[1, -2], [0, 1]]  # size, and how narrow
    cubes = at(1024, 1024), at(8192, 8192)
    near = [
        1 / np.array([np.sum((at(m, n) - cube) ** 2) for cube in cubes]) for m, n, _ in shapes[2:]
    ]
    expected = [model[2 + i] * (w @ (1 / factors)) / w.sum() for i, w in enumerate(near)]
    np.testing.assert_allclose(gains(), [small, large, *expected])
    assert gains()[3] < gains()[2] - 0.1  # it moves more bytes for as many multiplications
    for name, us in (("bf16", 300.0), ("delayed", 600.0), ("current", 600.0)):
        layers[name]["us"]["32768x1024"] = us
    judge(gpu.kind, layers=layers)
    np.testing.assert_allclose(gains()[[0, 1, 3]], [small, large, 0.5])


def test_a_kernel_that_failed_is_never_chosen_and_that_is_said():
    judge(H200.kind, cublaslt_f8=("cuBLASLt products", "off by 3"), matmul=("products", "hang"))
    with warnings.catch_warnings(record=True, action="always") as said:
        choice = backend()
    assert choice.backend.name == "bf16"
    assert choice.refused["xla"] == f"NVIDIA H200: cublaslt_f8 {CHECKED}"
    texts = {str(w.message) for w in said}
    (text,) = (t for t in texts if "cublaslt_f8" in t)
    assert "off by 3" in text
    assert "Check again after an upgrade" in text


@needs_mosaic
@pytest.mark.parametrize(
    ("kernel", "task", "left"),
    [
        (None, "", ("mosaic_gpu", True, "")),
        ("quantize_lines", "quantizing", ("mosaic_gpu", False, "quantize_lines")),
        ("grouped_outer", "grouped products", ("mosaic_gpu", True, "grouped_outer")),
        ("matmul", "products", ("xla", True, "matmul")),
    ],
)
def test_each_task_is_left_out_alone(kernel, task, left):
    """Rows of scales, quantizing in blocks, and groups, which need all three."""
    judge(H200.kind, **({kernel: (task, "wrong")} if kernel else {}))
    with warnings.catch_warnings(record=True, action="always") as said:
        multiplies = backend("rows").backend.name
        quantizes = quantizing_k_major(get("block"), (4096,) * 3, H200, None)
        groups = why_not_grouped_kernels(get("block"), False, H200)
    why = f"NVIDIA H200: {left[2]} {CHECKED}" if kernel else None
    assert (multiplies, quantizes, groups) == (*left[:2], why)
    assert all(kernel in str(w.message) for w in said)
    assert bool(said) == bool(kernel)


def test_cudnn_is_left_out_on_blackwell():
    mx = {"granularity": "blocks", "gpu": B200, "blocks": ((32, 1), (32, 1)), "powers_of_two": True}
    assert backend(**mx).backend.name == "cudnn"
    judge(B200.kind, cudnn_mx=("MX products", "wrong"))
    with pytest.warns(UserWarning, match="cudnn_mx"):
        assert backend(**mx).backend.name == "bf16"


def test_a_named_implementation_raises_with_the_verdict():
    judge(H200.kind, cublaslt_f8=("cuBLASLt products", "wrong"))
    q = jfp8.quantize(jnp.ones((32, 32)), E4M3FN)
    multiply = lambda q: jfp8.scaled_matmul(q, q, PLAIN, implementation="xla")
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=described("NVIDIA H200"))),
        pytest.warns(UserWarning, match="cublaslt_f8"),
        pytest.raises(NotImplementedError, match="NVIDIA H200: cublaslt_f8 failed"),
    ):
        jax.eval_shape(multiply, q)


def described(kind):
    return AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")


def test_a_verdict_is_for_one_card_and_these_versions(monkeypatch):
    path = judge(B200.kind, cublaslt_f8=("cuBLASLt products", "wrong"))
    assert backend().backend.name == "xla"
    newer = verdicts.versions() | {"cuda": "99.0"}
    monkeypatch.setattr(verdicts, "versions", lambda: newer)
    assert verdicts.verdict_file(B200.kind) != path
    assert backend(gpu=B200).backend.name == "xla"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kernels": {"matmul": {}}}', '{"kernels": 1}'])
def test_a_file_that_is_no_verdict_is_told(text):
    judge(H200.kind).write_text(text)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert backend().backend.name == "xla"


def test_a_cpu_never_reads_it(monkeypatch):
    judge("cpu").write_text("{")
    monkeypatch.setattr(verdicts, "verdicts", lambda kind: 1 / 0)
    x = jnp.ones((32, 32))
    assert jfp8.scaled_dot_general(x, x, PLAIN)[0, 0] > 31
    assert verdicts.why_failed({"products"}, None) is None
    with pytest.raises(ZeroDivisionError):
        verdicts.why_failed({"products"}, H200)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11, 2), reason="this JAX has the kernels")
def test_a_jax_without_the_kernels_is_told_for_cards_that_could_use_them():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # the setting of users: once for each line that warns
        backend(granularity="rows")
        assert why_no_quantizing(H200) == BACKEND.why_not_on(H200)
    (warning,) = caught
    assert "none of jfp8's Pallas kernels for the NVIDIA H200" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend(granularity="rows", gpu=Gpu("NVIDIA L40S", (8, 9)))
