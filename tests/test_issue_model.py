"""bench/issue_model.py: what a hand-made loop costs, and the report that uses the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import simulator

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

from issue_model import ORDERS, Sm, tensor_share  # noqa: E402
from sass import Instruction, disassemble, executed, find_cuobjdump, steady_loop  # noqa: E402


def _instruction(text: str, stall: int = 1, write: int = 7, read: int = 7, wait: int = 0, address: int = 0):
    return Instruction(address, text, stall | 1 << 4 | write << 5 | read << 8 | wait << 11)


HMMA = _instruction("HMMA.16816.F32.BF16 R0, R4, R8, R0", stall=8)


def _trip_clocks(loop: list[Instruction], ctas: int, warps: int) -> float:
    sm = Sm(loop, ctas, warps)
    sm.run(4, ORDERS[0])
    first, *_, last = sm.warps[0].finished
    return (last - first) / 3


def test_control_code() -> None:
    wait_for_two = _instruction("@!P0 LDSM.16.M88.4 R8, [R2]", stall=5, write=2, read=1, wait=0b101)
    assert (wait_for_two.stall, wait_for_two.write_barrier, wait_for_two.read_barrier) == (5, 2, 1)
    assert wait_for_two.wait == 0b101
    assert wait_for_two.opcode == "LDSM"


@pytest.mark.parametrize("order", ORDERS)
def test_tensor_work_alone_reaches_the_peak(order: str) -> None:
    assert tensor_share([HMMA] * 16, 1, 4, order) == pytest.approx(1, abs=0.01)
    assert tensor_share([HMMA] * 16, 2, 4, order) == pytest.approx(1, abs=0.01)


def test_warps_of_a_scheduler_share_its_units() -> None:
    """One warp a scheduler: the stalls; two: the unit, which both need for 8 clocks."""
    assert _trip_clocks([HMMA] * 10, 1, 4) == 80
    assert _trip_clocks([HMMA] * 10, 2, 4) == 160
    exponentials = [_instruction("MUFU.EX2 R1, R1", stall=1)] * 10
    assert _trip_clocks(exponentials, 1, 4) == 80
    adds = [_instruction("FADD R1, R1, R2", stall=4)] * 10
    assert _trip_clocks(adds, 1, 4) == 40
    assert _trip_clocks(adds, 2, 4) == 40
    assert _trip_clocks(adds, 4, 4) == 80  # 2 clocks each
    moves = [_instruction("NOP", stall=1)] * 10
    assert _trip_clocks(moves, 3, 4) == 30  # one instruction a clock


def test_a_wait_holds_the_warp_until_the_load_is_there() -> None:
    load = _instruction("LDSM.16.M88.4 R8, [R2]", write=0)
    use = _instruction("HMMA.16816.F32.BF16 R0, R4, R8, R0", stall=8, wait=1)
    assert _trip_clocks([load, HMMA], 1, 1) == 9
    assert _trip_clocks([load, use], 1, 1) == 29 + 8
    # The four schedulers' loads go through one shared memory, 4 clocks each.
    assert _trip_clocks([load] * 10, 1, 4) == pytest.approx(160, abs=10)
    off = _instruction("@!PT LDS RZ, [RZ]")
    assert _trip_clocks([off] * 10, 1, 4) == 10


def test_a_barrier_holds_a_cta_until_its_slowest_warp() -> None:
    barrier = _instruction("BAR.SYNC.DEFER_BLOCKING 0x0", stall=6)
    assert _trip_clocks([HMMA, barrier], 1, 4) == 8 + 20
    assert _trip_clocks([HMMA, barrier], 2, 4) < 2 * (8 + 20)  # another CTA does not wait


def test_copies_are_waited_for() -> None:
    copy = _instruction("LDGSTS.E.BYPASS.LTC128B.128 [R2], [R4.64]", stall=1)
    commit = _instruction("LDGDEPBAR", write=0)
    wait = _instruction("DEPBAR.LE SB0, 0x0", stall=4)
    loose = _instruction("DEPBAR.LE SB0, 0x1", stall=4)
    assert _trip_clocks([copy, commit, wait], 1, 1) == pytest.approx(400, abs=5)
    assert _trip_clocks([copy, commit, loose], 1, 1) < 250  # one group may be under way
    tensor = [HMMA] * 100
    assert _trip_clocks([copy, commit, *tensor, wait], 1, 1) == pytest.approx(800, abs=10)


def _listing(*texts: str) -> list[Instruction]:
    return [_instruction(text, address=16 * i) for i, text in enumerate(texts)]


def test_the_steady_loop_is_the_unmasked_one_without_its_rare_path() -> None:
    rare = ["FMUL R0, R0, R1"] * 60
    unmasked = [*["HMMA R0, R0, R0, R0"] * 16, "@!P0 BRA 0x4e0", *rare, "NOP", "@P1 BRA 0x10"]
    masked = [*["HMMA R0, R0, R0, R0"] * 32, *["FSEL R0, R0, R1, P0"] * 32, "@P1 BRA 0x500"]
    listing = _listing("NOP", *unmasked, *masked)
    assert (listing[78].text, listing[78].address, listing[80].address) == ("NOP", 0x4E0, 0x500)
    assert [x.opcode for x in steady_loop(listing)] == [*["HMMA"] * 16, "BRA", "NOP", "BRA"]
    assert len(list(executed(listing, 80, 144))) == 65


#: FlashAttention-2 2.8.3 under the model, per order; docs/kernels.md has the command.
FLASH_SHARES = {64: (0.697, 0.720, 0.652), 128: (0.809, 0.821, 0.756)}


@pytest.mark.parametrize("head_dim", FLASH_SHARES)
def test_prefill_is_ahead_of_flash_attention_under_every_order(head_dim: int) -> None:
    if reason := simulator.missing():
        pytest.skip(reason)
    if (cuobjdump := find_cuobjdump()) is None:
        pytest.skip("no cuobjdump: requirements/test.txt has it")
    path = simulator.build_folder() / "cuda" / "inst" / f"attention_bf16_hd{head_dim}.cu.o"
    (listing,) = disassemble(cuobjdump, path).values()
    loop = steady_loop(listing)
    shares = {order: tensor_share(loop, 2, 4, order, offsets=4) for order in ORDERS}
    behind = {
        order: share
        for (order, share), flash in zip(shares.items(), FLASH_SHARES[head_dim], strict=True)
        if share <= flash
    }
    assert behind == {}


def test_kernel_report() -> None:
    """The command over the build under test: every kernel, the steady loops' share included."""
    if reason := simulator.missing():
        pytest.skip(reason)
    if (cuobjdump := find_cuobjdump()) is None:
        pytest.skip("no cuobjdump: requirements/test.txt has it")
    folder = simulator.build_folder() / "cuda"
    command = [sys.executable, str(BENCH / "kernel_report.py"), "--objects", str(folder), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["kernel"]: row for row in json.loads(result.stdout)}
    for kernel in ("prefill_attn", "decode_split", "retained_mass", "merge_states", "append"):
        assert any(name.startswith(kernel) for name in rows)
    for head_dim in (64, 96, 128, 256):
        row = rows[f"prefill_attn bf16 {head_dim}"]
        assert row["spill_bytes"] == row["bank_conflicts"] == 0
        assert 0.5 < row["bound"]["modelled"] <= row["bound"]["share"]
        (listing,) = disassemble(cuobjdump, folder / "inst" / f"attention_bf16_hd{head_dim}.cu.o").values()
        assert row["loop_per_hmma"] == len(steady_loop(listing)) / row["loop_mix"]["HMMA"]
