"""Train the language model in two processes, as on two hosts, and check that they agree.

    python examples/train_processes.py

Two processes of 4 virtual CPU devices each find each other over the loopback interface with
`jax.distributed`, and run the program of `train_sharded.py` on a mesh of all 8. At the end they
compare their amax histories bit by bit. A third process, with its own 8 devices, trains
without any network: its losses are the same except for the order of sums.

On a cluster you do not need this script: run one `train_sharded.py` per host, with
`jax.distributed.initialize()` in front of `main()`.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lm import options, report

PROCESSES = 2
DEVICES = 8  # all processes together
SMALL = "--width=64 --layers=2 --heads=4 --seq-len=64 --batch-size=8 --steps=10"


def work(process: int | None, coordinator: str, result: str, argv: list[str]) -> None:
    """Run one process: number `process` of two, or with None the only one."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES if process is None else DEVICES // PROCESSES)
    if process is not None:
        jax.distributed.initialize(coordinator, PROCESSES, process, initialization_timeout=60)

    import train_sharded
    from lm import corpus, sharding

    parser = train_sharded.make_parser()
    args = parser.parse_args(argv)
    mesh = train_sharded.mesh_of(parser, args)
    run = train_sharded.train(args, mesh, corpus.load(args.text, args.seq_len, "--text"))
    figures = {
        "losses": run.losses,
        "devices": {"all": jax.device_count(), "of_this_process": jax.local_device_count()},
        "equal_histories": {
            "devices_of_this_process": sharding.assert_same_on_every_device(run.state.fp8),
            "processes": sharding.assert_same_in_every_process(run.state.fp8),
            "bytes": sharding.bytes_of(run.state.fp8),
        },
    }
    Path(result).write_text(json.dumps(figures))
    if process is not None:
        jax.distributed.shutdown()


@dataclasses.dataclass(frozen=True)
class Worker:
    """This script, started in another process; its output goes to a file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    result: Path


def start(name: str, coordinator: str, folder: Path, argv: list[str]) -> Worker:
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    command = [sys.executable, __file__, "--worker", name, coordinator, str(result), *argv]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    return Worker(name, process, log, result)


def wait(workers: list[Worker], seconds: float) -> list[dict[str, Any]]:
    """Return the results of each worker. The first failure, or a timeout, ends all workers."""
    deadline = time.monotonic() + seconds
    try:
        while any(w.process.poll() is None for w in workers):
            if any(w.process.poll() for w in workers) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for w in workers:
            w.process.kill()
            w.process.wait()
    if any(w.process.returncode for w in workers):
        for w in workers:
            print(f"--- process {w.name} ended with status {w.process.returncode}, with output:")
            print(w.log.read_text()[-4000:])
        raise SystemExit(f"a process failed, or {seconds:.0f} s were not enough: see above")
    return [json.loads(w.result.read_text()) for w in workers]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = options.parser_of("train_processes.py", __doc__)
    parser.epilog = f"All other options are those of train_sharded.py; here they begin with {SMALL}"
    parser.add_argument("--timeout", type=float, default=240.0, metavar="SECONDS",
                        help="for each of the two trainings (%(default)s)")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", default="runs/train_processes",
                        help="for result.json (%(default)s)")  # fmt: skip
    args, others = parser.parse_known_args(argv)
    told = [*SMALL.split(), *others]  # the last of a repeated option counts

    with tempfile.TemporaryDirectory() as name:
        folder, coordinator = Path(name), f"localhost:{free_port()}"
        pair = [start(str(i), coordinator, folder, told) for i in range(PROCESSES)]
        first, second = wait(pair, args.timeout)
        (single,) = wait([start("alone", coordinator, folder, told)], args.timeout)

    apart = [abs(a / b - 1) for a, b in zip(first["losses"], single["losses"], strict=True)]
    result = {
        "processes": [first, second],
        "single_process": single,
        "losses_equal_in_both_processes": first["losses"] == second["losses"],
        "first_loss_differs_by": apart[0],
        "any_loss_differs_by": max(apart),
    }
    for i, figures in enumerate(result["processes"]):
        of_all = "{of_this_process} of {all} devices".format(**figures["devices"])
        print(f"process {i}: {of_all}, last loss {figures['losses'][-1]:.6f}")
    print(f"one process: {single['devices']['all']} devices, last loss {single['losses'][-1]:.6f}")
    equal = first["equal_histories"]
    print(
        f"amax histories ({equal['bytes']:,} bytes): equal to the last bit on all "
        f"{equal['devices_of_this_process']} devices of each of {equal['processes']} processes"
    )
    print(
        f"losses of one process differ by {apart[0]:.1e} in the first step, and by at most "
        f"{max(apart):.1e} in {len(apart)} steps"
    )
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {out}: result.json")
    figures = {"loss": first["losses"][-1], "single_process": single["losses"][-1]}
    figures |= {"any_loss_differs_by": max(apart), "steps": len(apart)}
    print(report.result_line("train_processes", metric="train_loss", **figures))
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, coordinator, result, *argv = sys.argv[2:]
        work(None if name == "alone" else int(name), coordinator, result, argv)
    else:
        main()
