"""`python -m jfp8 check`, rehearsed: kernels that are wrong, hang or crash are never chosen."""

import json
import re
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.command_line import cases, check
from jfp8.command_line.child import ask
from jfp8.command_line.exactness import check_sums, rehearsed
from jfp8.command_line.parser import main
from jfp8.kernels.verdicts import measured_gains, verdict_file, why_failed
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Gpu
from support.devices import needs_mosaic

H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def no_layers(monkeypatch):
    monkeypatch.setattr(check, "LAYERS", ())


def checked(table, kernels=None):
    result, lines, is_right = check.run(Namespace(seconds=300.0, kernels=kernels), table)
    return result, "\n".join(lines), is_right


def test_what_is_wrong_or_crashes_is_left_out_afterwards():
    result, text, is_right = checked("planted_cases:CASES")
    assert not is_right
    assert result["card"] == H200
    kinds = {name: kernel["kind"] for name, kernel in result["kernels"].items()}
    assert kinds == {"right": "", "wrong": "error", "crashing": "crash"}
    assert "64 differ, the first at (1,): 3.0 instead of 2.0" in text
    assert "exit code -6: an illegal memory access was encountered" in text
    assert "2 of 3 kernels failed: wrong, crashing." in text
    stored = json.loads(verdict_file(H200).read_text())
    assert check._store(result) is None  # again, where the folder exists
    assert stored["versions"] == {
        "jfp8": jfp8.__version__,
        "jax": jax.__version__,
        "cuda": stored["versions"]["cuda"],
    }
    with warnings.catch_warnings(record=True, action="always") as said:
        card = Gpu(H200, (9, 0))
        why = [
            why_failed({task}, card)
            for task in ("quantizing", "cuBLASLt products", "grouped products")
        ]
    assert why == [
        None,
        *(f"{H200}: {n} failed `python -m jfp8 check`" for n in ("wrong", "crashing")),
    ]
    assert len(said) == 2


def test_what_hangs_is_ended():
    answer = ask("time:sleep", 1000, limit=1)
    assert (answer["kind"], answer["failure"]) == ("hang", "no answer within 1 s")
    assert answer["seconds"] < 60


@pytest.mark.slow
def test_layers_are_timed_with_the_verdicts(monkeypatch):
    """Of small layers on the CPU, which is named an H200."""
    monkeypatch.setattr(check, "LAYERS", ("bf16", "rowwise", "nonsense"))
    monkeypatch.setattr(check, "SIZES", ((16, 16), (64, 32)))
    result, text, is_right = checked("planted_cases:HARMLESS")
    assert not is_right
    assert "nonsense" in result["layers"]["nonsense"]["failure"]
    assert "All 1 kernels are right." in text
    times = {name: result["layers"][name]["us"] for name in ("bf16", "rowwise")}
    gains = {
        (m, n): times["bf16"][f"{m}x{n}"] / times["rowwise"][f"{m}x{n}"] for m, n in check.SIZES
    }
    assert measured_gains(H200, "rows") == gains
    assert f"64x32: {times['rowwise']['64x32']:.4g}" in text
    assert measured_gains(H200, "blocks") == {}


def test_the_slope_is_the_time_of_one_call(monkeypatch):
    """Though each program takes a second more, by a clock that is made up here."""
    monkeypatch.setattr(check, "seconds", lambda run: 1 + 2e-3 * len(run.args[0]))
    assert check.microseconds(lambda x: x, (jnp.ones(3),)) == pytest.approx(2000)


@pytest.mark.parametrize("recipe", ["bf16", "block"])
def test_a_layer_is_the_product_and_both_gradients(recipe):
    function, (variables, x, dy) = check.layer(recipe, 32, 64)
    w = variables["params"]["kernel"]
    grads, dx = function(variables, x, dy)
    for found, expected in ((dx, dy @ w.T), (grads["params"]["kernel"], x.T @ dy)):
        error = jnp.linalg.norm((found - expected).astype(jnp.float32))
        norm = jnp.linalg.norm(expected.astype(jnp.float32))
        assert error < (0.01 if recipe == "bf16" else 0.1) * norm


@pytest.mark.slow
def test_what_passes_again_is_chosen_again():
    path = verdict_file(H200)
    path.parent.mkdir(parents=True)
    bad = {"right": {"task": "quantizing", "failure": "wrong"}}
    path.write_text(json.dumps({"kernels": bad}))
    _, text, is_right = checked("planted_cases:HARMLESS")
    assert is_right
    assert "All 1 kernels are right." in text
    assert why_failed({"quantizing"}, Gpu(H200, (9, 0))) is None


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result, text, is_right = checked("planted_cases:HARMLESS")
    assert not is_right
    assert "cannot be written" in result["not_stored"]
    assert "Set XDG_CACHE_HOME to a folder that you may write to" in text


@pytest.mark.slow
def test_some_kernels_alone_are_checked_but_not_stored():
    result, text, is_right = checked("planted_cases:CASES", kernels=["right"])
    assert is_right
    assert text.endswith("so nothing is stored.")
    assert list(result["kernels"]) == ["right"]
    assert not verdict_file(H200).exists()
    with pytest.raises(SystemExit, match="no kernel nonsense; it has right, wrong, crashing"):
        checked("planted_cases:CASES", kernels=["nonsense"])


@needs_mosaic
def test_a_kernel_that_is_subtly_wrong_is_caught():
    result, _, is_right = checked("planted_cases:SUBTLE")
    assert not is_right
    assert "of 9792 differ, the first at (71, 0)" in result["kernels"]["matmul"]["failure"]
    with pytest.warns(UserWarning, match="does not use its kernels for products"):
        assert why_failed({"products"}, Gpu(H200, (9, 0)))


def test_the_command_on_this_machine(capsys):
    """One kernel that any JAX can run on a CPU."""
    assert main(["check", "--kernels", "cublaslt_f8", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["card"], found["interpreted"]) == ("cpu", True)
    assert re.fullmatch(r"kernel cublaslt_f8 \.\.\. \d+\.\d s\n", printed.err)
    (kernel,) = found["kernels"].values()
    assert kernel["failure"] == ""
    assert kernel["measured"]["part_of_bound"] < 1e-3  # f32 adds almost exactly


def test_jax_before_0_11_2_tries_no_pallas_kernel(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert {case.by for case in cases.CASES if case.is_for((10, 0))} == {"xla", "cudnn"}
    assert {case.by for case in cases.CASES if case.is_for(None)} == {"xla"}


def test_a_task_of_each_planner_is_checked():
    """Otherwise its kernels could never be left out."""
    sources = [p.read_text() for p in (Path(jfp8.__file__).parent / "kernels").rglob("*.py")]
    pattern = r"why_(?!left_out)\w+\((.*?)\)[\n):,]"
    calls = [call for s in sources for call in re.findall(pattern, s)]
    named = {task for call in calls for task in re.findall(r'"([a-z][\w ]+)"', call)}
    assert {"products", "quantizing", "grouped products"} <= named
    tasks = {case.task for case in cases.CASES}
    assert named <= tasks
    assert tasks - named == {"cuBLASLt products", "MX products", "NVFP4 products"}
    assert len({case.kernel for case in cases.CASES}) == len(cases.CASES)


@needs_mosaic
@pytest.mark.parametrize("name", ["cudnn_mx", "cudnn_nvfp4"])
def test_block_scaled_products_are_checked_by_the_reference(name, monkeypatch):
    """XLA computes them on a CPU, too."""
    (case,) = (case for case in cases.CASES if case.kernel == name)
    backend, *others = case.arguments
    assert case.check(backend, *others)["part_of_bound"] < 1
    swapped = lambda lhs, rhs, spec: backend.multiply(
        replace(lhs, scale=lhs.scale[::-1]), rhs, spec
    )
    with pytest.raises(AssertionError, match="of 32768 differ"):
        case.check(replace(backend, multiply=swapped), *others)


@needs_mosaic
def test_quantized_bytes_and_amaxes_are_checked(monkeypatch):
    """A kernel that clears one element of the transposed matrix, or forgets the largest of all."""
    (case,) = (case for case in cases.CASES if case.kernel == "tensor_amax")
    right = cases.quantize_both_ways

    def loses_one(*arguments):
        found = right(*arguments)
        data = found.transposed.data.at[5, 7].set(0)
        return found._replace(transposed=ScaledArray(data, found.transposed.scale))

    def loses_the_largest(*arguments):
        found = right(*arguments)
        return found._replace(amax=jnp.minimum(found.amax, 1.0))

    for wrong, words in (
        (loses_one, "result 1: 1 of 9792"),
        (loses_the_largest, "result 2: 1 of 1"),
    ):
        monkeypatch.setattr(cases, "quantize_both_ways", wrong)
        with rehearsed(), pytest.raises(AssertionError, match=words):
            case.check(*case.arguments)


def test_the_bound_on_products_is_that_of_14_bits():
    draw = lambda make: (make((32, 256), np.float32, 1), make((32, 256), np.float32, 2))
    exact = lambda a, b: jnp.matmul(a, b.T, precision="highest")
    off = lambda factor: lambda a, b: jnp.where(jnp.all(a == jnp.round(a)), 1, factor) * exact(a, b)
    assert check_sums(exact, exact, draw, 256)["part_of_bound"] == 0
    assert 0 < check_sums(off(1.0001), exact, draw, 256)["part_of_bound"] < 1
    for factor in (1.02, np.nan):
        with pytest.raises(AssertionError, match="times the bound"):
            check_sums(off(factor), exact, draw, 256)
    with pytest.raises(AssertionError, match="of 1024 differ"):
        check_sums(lambda a, b: exact(a, b) + 1, exact, draw, 256)
