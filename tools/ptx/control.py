"""Wait for others, and talk to the other lanes: barriers, shuffles, and the register file."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.access import address
from ptx.events import Event
from ptx.memory import Fault, MBarrier
from ptx.parser import LANES, Instruction, Registers
from ptx.warp import Act, Waiting, Warp

NOTHING = ("prefetch", "fence.mbarrier_init", "membar", "nanosleep")
REGISTER_FILE = 65536
WINDOW = 1 << 24  # from one block's shared memory to the next one's, in addresses of a cluster


def control(instruction: Instruction, at: Registers) -> Act | None:
    """Return what runs such an instruction; None: it is another."""
    op, operands = instruction.op, instruction.operands
    if op.startswith(NOTHING):
        return lambda warp, lanes: None
    if op.startswith("fence.proxy.async"):
        return lambda warp, lanes: warp.block.shared.fence(warp.number)
    make = BY_NAME.get(op.split(".")[0])
    return make(op.split("."), operands, at) if make else None


def _return(*_: Any) -> Act:
    def end(warp: Warp, lanes: np.ndarray) -> None:
        if unfinished := [*warp.products.unfinished(), *warp.stores.unfinished()]:
            raise Fault(f"the warp ends, and does not wait for its {unfinished[0].what}")
        warp.ended = True

    return end


def _elect(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    lane, chosen = (at(x) for x in operands[0].split("|"))

    def run(warp: Warp, lanes: np.ndarray) -> None:
        warp.registers[lane] = np.zeros(32, np.uint32)
        warp.registers[chosen] = LANES == 0

    return run


def _shuffle(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    """Take from the lane of this number (idx), or of a number with other bits (bfly)."""
    out, source, which = at(operands[0].split("|")[0]), at(operands[1]), at(operands[2])

    def run(warp: Warp, lanes: np.ndarray) -> None:
        number = warp.registers[which].astype(np.int64) & 31
        of = number if op[2] == "idx" else LANES ^ number
        warp.registers[out] = warp.registers[source][of]

    assert op[2] in ("idx", "bfly")
    return run


def _registers(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    """Take registers for each thread, or give them back: a warp waits until there are so many."""
    number, gives = int(operands[0]), op[1] == "dec"

    def run(warp: Warp, lanes: np.ndarray) -> Waiting | None:
        of = warp.block.registers
        if (of[warp.number] < number) == gives:
            raise Fault(f"{of[warp.number]} registers become {number}")

        def free() -> bool:
            if sum(of) - of[warp.number] + number > REGISTER_FILE // 32:
                return False
            of[warp.number] = number
            return True

        return None if free() else free

    return run


def _barrier(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    """Wait until so many threads are here."""
    name, *count = (at(x) for x in operands)

    def run(warp: Warp, lanes: np.ndarray) -> Waiting:
        block = warp.block
        number = int(warp.registers[name][0])
        threads = int(warp.registers[count[0]][0]) if count else 32 * len(block.warps)
        here, generation = block.named_barriers.setdefault(number, [set(), 0])
        if warp.number in here:
            raise Fault(f"arrives twice at barrier {number}")
        here.add(warp.number)
        if 32 * len(here) == threads:
            block.named_barriers[number] = [set(), generation + 1]
        return lambda: block.named_barriers[number][1] > generation

    return run


def _mbarrier(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    if op[1] == "init":
        where, count = address(operands[0], at), at(operands[1])

        def init(warp: Warp, lanes: np.ndarray) -> None:
            (place,) = set(where(warp.registers)[lanes].tolist())
            warp.block.shared.barriers[place] = MBarrier(int(warp.registers[count][lanes][0]))

        return init
    if op[1] == "try_wait":
        done, where, parity = at(operands[0]), address(operands[1], at), at(operands[2])

        def wait(warp: Warp, lanes: np.ndarray) -> Waiting:
            barrier = warp.block.shared.barrier(int(where(warp.registers)[0]))
            wanted = int(warp.registers[parity][0])
            warp.registers[done] = np.ones(32, bool)
            return lambda: barrier.phase & 1 != wanted

        return wait
    assert op[1] == "arrive", op
    if "shared::cluster" in op:
        return _arrive_in_cluster(operands, at)
    where, expects = address(operands[1], at), "expect_tx" in op
    number = at(operands[2]) if len(operands) > 2 else at("1")

    def arrive(warp: Warp, lanes: np.ndarray) -> None:
        numbers = warp.registers[number]
        for lane in LANES[lanes]:
            barrier = warp.block.shared.barrier(int(where(warp.registers)[lane]))
            given = int(numbers[lane])
            barrier.arrive(*((1, given) if expects else (given,)))

    return arrive


def _arrive_in_cluster(operands: tuple[str, ...], at: Registers) -> Act:
    """Arrive once at another block's barrier, or at an own one, sooner or later."""
    where = address(operands[1], at)

    def arrive(warp: Warp, lanes: np.ndarray) -> None:
        for lane in LANES[lanes]:
            rank, place = divmod(int(where(warp.registers)[lane]), WINDOW)
            block = warp.block.cluster[rank - 1]

            def happen(block: Any = block, place: int = place) -> None:
                block.must_run("an arrival")
                block.shared.barrier(place).arrive(1)

            Event("arrival", warp, [happen])

    return arrive


def _map_address(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    """Turn an address of shared memory into the one of another block of the cluster."""
    out, place, rank = map(at, operands)

    def run(warp: Warp, lanes: np.ndarray) -> None:
        r = warp.registers
        r[out] = np.where(lanes, r[place] + (r[rank] + 1) * np.uint32(WINDOW), r[out])

    return run


def _meet(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    """Arrive at the barrier of a cluster, or wait until all its warps have."""

    def arrive(warp: Warp, lanes: np.ndarray) -> None:
        warp.met += 1

    def wait(warp: Warp, lanes: np.ndarray) -> Waiting:
        met, warps = warp.met, [other for block in warp.block.cluster for other in block.warps]
        return lambda: all(other.met >= met for other in warps)

    return {"arrive": arrive, "wait": wait}[op[2]]


BY_NAME: dict[str, Callable[..., Act]] = {
    "ret": _return, "bar": _barrier, "mbarrier": _mbarrier, "elect": _elect, "shfl": _shuffle,
    "setmaxnreg": _registers, "mapa": _map_address, "barrier": _meet,
}  # fmt: skip
