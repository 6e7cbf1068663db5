"""Kernels compiled for an H200 (sm_90) without one: what the interpreter takes and the compiler does not shows here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed (dev: pip install --no-deps 'triton>=3.9')")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiled, not interpreted", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.kernels.jit import adjust, delta, frame, grammar, logprobs, sample, schedule
from slipstream.kernels.tuning import DeltaConfig
from slipstream.train import jit_block

INT, REAL, DOUBLE, SHORT, N = "*i64", "*fp32", "*fp64", "*i32", "i32"
PENALTIES = {"repetition_ptr": DOUBLE, "presence_ptr": DOUBLE, "frequency_ptr": DOUBLE}
ADJUST = {
    **dict.fromkeys(("x_ptr", "out_ptr"), REAL),
    **dict.fromkeys(("slot_ptr", "cell_ptr", "committed_ptr", "pending_ptr", "seen_ptr"), INT), "tally_ptr": SHORT,
    **PENALTIES, "bias_count_ptr": INT, "bias_id_ptr": INT, "bias_value_ptr": DOUBLE, "V": N, "PW": N, "N": N,
}  # fmt: skip
COUNT = {"tally_ptr": SHORT, "slot_ptr": INT, **PENALTIES, "record_ptr": INT, "V": N, "C": N, "W": N}
RECOUNT = {
    "tally_ptr": SHORT, "slot_ptr": INT, **PENALTIES, "history_ptr": INT, "prompt_len_ptr": INT, "committed_ptr": INT,
    "V": N, "L": N,
}  # fmt: skip
TILES = {
    "x_ptr": REAL, "row_ptr": INT, "token_ptr": INT, "wanted_ptr": INT, "top_ptr": REAL, "sum_ptr": REAL,
    "above_ptr": SHORT, "best_ptr": REAL, "where_ptr": SHORT, "M": N, "V": N,
}  # fmt: skip
ROWS = {**TILES, "table_ptr": INT, "first": N, "tiles": N}
MASKS = {
    "logits_ptr": REAL, **dict.fromkeys(("slot_ptr", "cell_ptr", "committed_ptr", "masked_ptr"), INT),
    "mask_ptr": SHORT, "R": N, "V": N, "W": N, "N": N,
}  # fmt: skip
ALLOT = {**dict.fromkeys(("active_ptr", "count_ptr", "survival_ptr", "slot_ptr"), INT), "B": N, "R": N}
OFFER = {
    **dict.fromkeys(
        ("token_ptr", "wish_ptr", "record_ptr", "slot_ptr", "active_ptr", "committed_ptr", "max_len_ptr",
         "max_drafts_ptr", "pending_ptr", "count_ptr", "survival_ptr", "out_ptr"), INT,
    ), "logit_ptr": REAL, "C": N, "PW": N,
}  # fmt: skip
CLOSE = {
    **dict.fromkeys(
        ("target_ptr", "residual_ptr", "token_ptr", "accepted_ptr", "emitted_ptr", "row_of_ptr", "rows_ptr", "slot_ptr",
         "generation_ptr", "active_ptr", "committed_ptr", "max_len_ptr", "stop_ptr", "history_ptr", "pending_ptr",
         "mode_ptr", "key_ptr", "child_ptr", "record_ptr"), INT,
    ), "p_ptr": REAL, "q_ptr": REAL, "L": N, "K": N, "V": N, "whole": N, "share": "i64",
}  # fmt: skip
ROUND = {"W": 8, "PW": 8, "WP": 8, "T": 16, "TP": 16}
FINISH = {"best_ptr": REAL, "where_ptr": SHORT, "out_ptr": INT, "R": N, "tiles": N, "V": N, "none": N}
RACE = {
    **dict.fromkeys(("logits_ptr", "peak_ptr", "threshold_ptr", "best_ptr", "sum_ptr", "p_out"), REAL),
    **dict.fromkeys(
        ("greedy_ptr", "slot_ptr", "pos_ptr", "mode_ptr", "committed_ptr", "pending_ptr", "target_out", "residual_out"),
        INT,
    ), "temperature_ptr": DOUBLE, "where_ptr": SHORT, "R": N, "V": N, "tiles": N, "PW": N,
}  # fmt: skip
BLOCK_ROWS = {
    **dict.fromkeys(("logits_ptr", "teacher_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("row_ptr", "target_ptr", "best_ptr"), INT),
    **dict.fromkeys(
        ("teacher_log_ptr", "log_ptr", "lean_ptr", "hard_ptr", "soft_ptr", "distance_ptr"), REAL
    ), "V": N,
}  # fmt: skip
WIDE = {"NP": 512, "BLOCK": adjust.TILE}
ONE = {"M": 1, "tiles": 1, "first": 1, "TB": 1, "KP": logprobs.LISTED}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]] = {
    "adjust, chains": (adjust.adjust_rows_kernel, ADJUST, {**WIDE, "TREE": 0, "PENALTIES": 1, "BIASES": 1}, {}),
    "adjust, trees": (adjust.adjust_rows_kernel, ADJUST, {**WIDE, "TREE": 1, "PENALTIES": 1, "BIASES": 1}, {}),
    "adjust, no drafts": (
        adjust.adjust_rows_kernel, ADJUST, {**WIDE, "PW": 1, "TREE": 0, "PENALTIES": 1, "BIASES": 0}, {}
    ),
    "count": (adjust.count_tokens_kernel, COUNT, {"FIRST": 6, "WP": 4}, {"num_warps": 1}),
    "recount": (adjust.recount_slots_kernel, RECOUNT, {"BLOCK": adjust.COUNT_BLOCK}, {"num_warps": 8}),
    "logprob tiles": (
        logprobs.logprob_tiles_kernel, TILES, {"BLOCK": logprobs.TILE, "KP": logprobs.LISTED}, {"num_warps": 8}
    ),
    "logprob rows": (logprobs.logprob_rows_kernel, ROWS, {"TB": 32, "KP": logprobs.LISTED}, {}),
    "logprob rows, one": (logprobs.logprob_rows_kernel, ROWS, ONE, {}),
    "masks": (grammar.mask_rows_kernel, MASKS, {"BLOCK": grammar.TILE}, {}),
    "allot": (schedule.allot_kernel, ALLOT, {"W": 8, "K": 7, "BP": 64, "KP": 8}, {"num_warps": 1}),
    "allot, one slot": (
        schedule.allot_kernel, ALLOT, {"B": 1, "R": 1, "W": 2, "K": 1, "BP": 32, "KP": 4}, {"num_warps": 1}
    ),
    "allot, many": (schedule.allot_kernel, ALLOT, {"W": 16, "K": 15, "BP": 512, "KP": 16}, {"num_warps": 8}),
    "offer with survivals": (schedule.offer_kernel, OFFER, {"D": 5, "DP": 8, "K": 7, "CP": 16}, {"num_warps": 1}),
    "close round": (frame.close_round_kernel, CLOSE, ROUND, {"num_warps": 1}),
    "close greedy": (frame.close_greedy_kernel, CLOSE, {**ROUND, "SYNTHETIC": False}, {"num_warps": 1}),
    "close sampled": (
        frame.close_sampled_kernel, CLOSE, {**ROUND, "DENSE": True, "SYNTHETIC": True}, {"num_warps": 1}
    ),
    "argmax": (sample.argmax_finish_kernel, FINISH, {"TB": 32, "PDL": False}, {}),
    "argmax, none is one": (sample.argmax_finish_kernel, FINISH, {"none": 1, "TB": 32, "PDL": False}, {}),
    **{
        f"a block's rows, {name}": (kernel, BLOCK_ROWS, {"BLOCK": jit_block.BLOCK}, {"num_warps": warps})
        for name, kernel, warps in (
            ("teacher", jit_block.teacher_kernel, 8), ("forward", jit_block.terms_kernel, 8),
            ("backward", jit_block.gradient_kernel, 4),
        )
    },
    "race": (sample.race_finish_kernel, RACE, {"TB": 32}, {"num_warps": 1}),
}  # fmt: skip
"""Kernel, types of its arguments, those that are known when it is compiled (an int of 1 always is), options."""


@pytest.mark.parametrize("name", CASES)
def test_it_compiles(name: str) -> None:
    kernel, types, known, options = CASES[name]
    signature = {arg: "constexpr" if arg in known else types[arg] for arg in kernel.arg_names}
    places = {(kernel.arg_names.index(arg),): value for arg, value in known.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(compiled.asm["cubin"]) > 1000


def test_what_does_not_compile_is_seen() -> None:
    kernel, types, known, _ = CASES["count"]
    signature = {arg: "constexpr" if arg in known else types[arg] for arg in kernel.arg_names}
    places = {(kernel.arg_names.index(arg),): value for arg, value in known.items()} | {
        (kernel.arg_names.index("WP"),): 3  # arange wants a power of two; the interpreter does not mind
    }
    with pytest.raises(triton.compiler.errors.CompilationError):
        triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=places), target=GPUTarget("cuda", 90, 32))


def test_a_program_of_delta_rows_asks_for_its_state_first(tmp_path: Path) -> None:
    """At Qwen3.5-9B's shape: 16 bytes a load, all before the wait for the launch in front, and kept in registers."""
    cut, kernel = DeltaConfig(), delta.delta_rows_kernel
    known = {
        "N": 32, "KEYS": 16, "DK": 128, "DV": 128, "X": 8256, "T": 4, "M": 10, "CHANNEL": 1, "TAP": 8192, "KP": 128,
        "BV": cut.columns, "SLICE": 128, "SCALE": 128**-0.5, "SAVES": True, "BY_SLOT": True, "PDL": True,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("x_ptr", "recent_ptr", "saved_in_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("state_ptr", "saved_ptr", "conv_ptr", "decay_ptr", "dt_ptr"), REAL),
        **dict.fromkeys(
            ("absorbed_ptr", "places_ptr", "committed_ptr", "slot_ptr", "rows_ptr", "row_of_ptr"), INT
        ), **dict.fromkeys(("B", "R", "x_stride", "row_of_stride", "places", "interval", "early"), N),
    }  # fmt: skip
    names = kernel.arg_names
    signature = {arg: "constexpr" if arg in known else types[arg] for arg in names}
    even = [i for i, arg in enumerate(names) if types.get(arg, "").startswith("*") or arg == "x_stride"]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(arg),): value for arg, value in known.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )  # fmt: skip
    options = {"num_warps": cut.warps, "launch_pdl": True, "maxnreg": cut.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    before, after = compiled.asm["ptx"].split("griddepcontrol.wait")
    wide, state = r"ld\.global\.v4\.b32", 128 * cut.columns // (4 * 32 * cut.warps)
    # A warp by itself reads the convolution's taps as wide, but there are fewer of them.
    assert len(re.findall(wide, before)) >= state > len(re.findall(wide, after))
    cubin = tmp_path / "delta_rows.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    used = registers_and_stack(cubin)
    assert used[0] <= (cut.registers or 255)
    assert used[1] <= 64, "bytes of a thread's registers that go to memory"


def registers_and_stack(cubin: Path) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1]), int(found[2])
