"""`python -m jfp8 check`, rehearsed: kernels that are wrong, hang or crash are never chosen."""

import json
import re
import time
import warnings
from argparse import Namespace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import jfp8
from jfp8.command_line import cases, check
from jfp8.command_line.child import ask
from jfp8.command_line.exactness import product_error
from jfp8.command_line.parser import main
from jfp8.kernels.blackwell.backend import MX, NVFP4
from jfp8.kernels.verdicts import verdict_file, why_failed
from jfp8.tracing.devices import Gpu
from support.devices import needs_mosaic

H200 = "NVIDIA H200"


def checked(table, seconds=60.0, kernels=None):
    result, lines, is_right = check.run(Namespace(seconds=seconds, kernels=kernels), table)
    return result, "\n".join(lines), is_right


def test_what_is_wrong_hangs_or_crashes_is_left_out_afterwards():
    start = time.monotonic()
    result, text, is_right = checked("planted_cases:CASES", seconds=1.5)
    assert time.monotonic() - start < 90
    assert not is_right
    assert result["card"] == H200
    kinds = {name: kernel["kind"] for name, kernel in result["kernels"].items()}
    assert kinds == {"right": "", "wrong": "error", "hanging": "hang", "crashing": "crash"}
    assert "64 differ, the first at (1,): 3.0 instead of 2.0" in text
    assert "no answer within 1.5 s to run" in text
    assert "exit code -6: an illegal memory access was encountered" in text
    assert "3 of 4 kernels failed: wrong, hanging, crashing." in text
    stored = json.loads(verdict_file(H200).read_text())
    assert check._store(result) is None  # again, where the folder exists
    assert stored["versions"] == {
        "jfp8": jfp8.__version__,
        "jax": jax.__version__,
        "cuda": stored["versions"]["cuda"],
    }
    with warnings.catch_warnings(record=True, action="always") as said:
        card = Gpu(H200, (9, 0))
        tasks = ("quantizing", "cuBLASLt products", "products", "attention")
        why = [why_failed({task}, card) for task in tasks]
    assert why == [
        None,
        *(f"{H200}: {n} failed `python -m jfp8 check`" for n in ("wrong", "hanging", "crashing")),
    ]
    assert len(said) == 3


def test_a_process_that_never_starts_is_ended():
    answer = ask("time:sleep", 1000, starting=1, running=100)
    assert (answer.kind, answer.failure) == ("hang", "no answer within 1 s to start and compile")


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
    result, _, is_right = checked("planted_cases:CASES", kernels=["right"])
    assert is_right
    assert list(result["kernels"]) == ["right"]
    assert not verdict_file(H200).exists()
    with pytest.raises(SystemExit, match="no kernel nonsense; it has right, wrong, hanging"):
        checked("planted_cases:CASES", kernels=["nonsense"])


@needs_mosaic
def test_a_kernel_that_is_subtly_wrong_is_caught():
    result, _, is_right = checked("planted_cases:SUBTLE")
    assert not is_right
    assert "of 9792 differ, the first at (71, 0)" in result["kernels"]["matmul"]["failure"]
    with pytest.warns(UserWarning, match="does not use its kernels for products"):
        assert why_failed({"products"}, Gpu(H200, (9, 0)))


def test_attention_may_be_as_far_off_as_fp8_explains(monkeypatch):
    """Other codes for some of P pass; a gradient that is 5 % too large does not, nor do zeros."""

    def kernels(factor):
        def run(attend, *operands):
            y, dq, *others = cases.on_cpu(partial(attend, implementation="emulate"), *operands)
            return y, (factor * dq.astype(np.float32)).astype(dq.dtype), *others

        monkeypatch.setattr(cases, "run", run)

    kernels(1.01)
    assert 0 < cases.check_attention("emulate")["dq"] < cases.ATTENTION_ERROR
    for factor in (1.05, 0):
        kernels(factor)
        with pytest.raises(AssertionError, match="dq is off by"):
            cases.check_attention("emulate")


def test_the_command_on_this_machine(capsys):
    """One kernel that any JAX can run on a CPU."""
    assert main(["check", "--kernels", "cublaslt_f8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["card"], found["interpreted"]) == ("cpu", True)
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
    assert {"products", "quantizing", "grouped products", "attention"} <= named
    tasks = {case.task for case in cases.CASES}
    assert named <= tasks
    assert tasks - named == {"cuBLASLt products", "MX products", "NVFP4 products"}
    assert len({case.kernel for case in cases.CASES}) == len(cases.CASES)


@needs_mosaic
@pytest.mark.parametrize("kind", [MX, NVFP4], ids=lambda kind: kind.name)
def test_block_scaled_products_are_checked_by_their_equation(kind, monkeypatch):
    """XLA computes them on a CPU, too."""
    assert cases.check_block_scaled(kind)["part_of_bound"] < 1
    right = cases.scaled_matmul
    swapped = lambda a, b, s, t, dtype: right(a, b, s[::-1], t, dtype)
    monkeypatch.setattr(cases, "scaled_matmul", swapped)
    with pytest.raises(AssertionError, match="of 32768 differ"):
        cases.check_block_scaled(kind)


def test_the_bound_on_products_is_that_of_14_bits():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((32, 256)).astype(np.float32) for _ in range(2))
    exact = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float32)
    assert product_error(exact, a, b, None, np.float32)["part_of_bound"] < 1e-3
    with pytest.raises(AssertionError, match="times the bound"):
        product_error(exact * 1.02, a, b, None, np.float32)
    with pytest.raises(AssertionError, match="times the bound"):
        product_error(np.full_like(exact, np.nan), a, b, None, np.float32)
