"""The production frame on fake CUDA tensors never waits for the device; each known slow form put back is seen."""

from __future__ import annotations

import pytest

from slipstream.audit import prove

TARGET = "slipstream.benchmark.frame_program:build"


TWO_LAYERS_TWO_FRAMES = {
    "greedy": "stream_rope", "suffix": "stream_rope", "sampled": "stream_rope", "dspark": "stream_rope",
    "scheduled": "stream_rope", "scheduled-sampled": "stream_rope",
    "library": "rope_kv_write", "model": "prefill_attention", "eagle3": "stream_rope", "eagle3-sampled": "stream_rope",
    "tree": "stream_rope", "tree-sampled": "stream_rope", "eagle3-off": "stream_rope", "grammar": "stream_rope",
    "mtp": "paged_attention", "mtp-sampled": "paged_attention", "mtp-off": "paged_attention",
    "requests": "stream_rope", "requests-tree": "stream_rope",
    "hybrid": "delta_rows", "mtp-hybrid": "paged_attention",
    "pictures": "prefill_attention", "pictures-hybrid": "gated_rope_write", "windows": "prefill_attention",
}  # fmt: skip


SLOW = ("mtp",)  # the others of its kind hold all that it does
KINDS = [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in TWO_LAYERS_TWO_FRAMES]


@pytest.mark.parametrize("kind", KINDS)
def test_the_frame_is_clean(kind: str) -> None:
    proof = prove(TARGET, args=[kind])
    assert proof.exit_code == 0, proof.table()
    assert proof.frames == 2 and proof.ops > 150
    # Each frame has a decode pass and a prefill pass; in the plain pass target and draft model read the prompt.
    # The head of one layer takes three passes after the decode pass, and three after the prefill pass: three drafts, or
    # three levels of a tree.
    # A block drafter's two layers pass once after each of the two.
    blocks = ("dspark", "scheduled", "scheduled-sampled")
    heads = ("eagle3", "eagle3-sampled", "mtp", "mtp-sampled", "tree", "tree-sampled", "requests-tree")
    times = {
        "library": 8,
        "model": 8,
        "hybrid": 2,
        "pictures-hybrid": 4,
        "mtp-hybrid": 2 + 12,
        "eagle3-off": 4 + 6,
        "mtp-off": 4 + 6,
        **dict.fromkeys(heads, 4 + 12),
        **dict.fromkeys(blocks, 4 + 8),
    }.get(kind, 4)
    assert proof.kernels[f"slipstream::{TWO_LAYERS_TWO_FRAMES[kind]}"] == times
    assert proof.kernels.get("slipstream::mask_rows", 0) == (
        4 if kind in ("grammar", "requests", "requests-tree") else 0
    )
    if kind.startswith("requests"):  # the first token of a prompt is counted too; its rows in four parts
        ops = ("adjust_rows", "recount_slots", "count_tokens", "token_logprobs")
        assert [proof.kernels[f"slipstream::{op}"] for op in ops] == [4, 2, 4, 4 + 2 * 4]
    if kind in blocks:  # three tokens of each chain; the context of a decode round, of a prompt and of its last row
        ops = ("block_rows", "context_write", "markov_head", "markov_next")
        assert [proof.kernels.get(f"slipstream::{op}", 0) for op in ops] == [4, 6, 12, 12 * (kind == "scheduled")]
    # In two launches: a decode round and a prompt's first token each. What an op starts: test_sample_references.
    if "hybrid" in kind:  # one recurrent layer; a decode pass and a prompt's in each of two frames
        assert [proof.kernels[f"slipstream::delta_{op}"] for op in ("absorb", "prompt")] == [2, 2]
    if "tree" in kind:  # decode rounds judge trees, sampled ones in tensor operations; a prompt's end has none
        ops = ("tree_rows", "compact_path", "close_round", "walk_trees", "close_sampled", "close_greedy")
        closing = [0, 2, 0] if kind != "tree" else [2, 0, 2]
        assert [proof.kernels.get(f"slipstream::{op}", 0) for op in ops] == [2, 2, 2, *closing]
        return
    # A scheduled decode round shares its rows out; it and a prompt's end leave drafts with survivals behind.
    scheduling = ("allot_drafts", "offer_scheduled")
    shared = [2, 4] if kind.startswith("scheduled") else [0, 0]
    assert [proof.kernels.get(f"slipstream::{op}", 0) for op in scheduling] == shared
    sampled = kind in (
        "sampled", "requests", "dspark", "model", "eagle3-sampled", "mtp-sampled", "scheduled-sampled"
    )  # fmt: skip
    ops = ("race_rows", "close_sampled", "close_greedy")
    assert [proof.kernels.get(f"slipstream::{op}", 0) for op in ops] == ([4, 4, 0] if sampled else [0, 0, 4])
    # Drafters choose three tokens after each of them.
    chosen = 12 if sampled and kind not in ("sampled", "requests") else 0
    assert proof.kernels.get("slipstream::draft_choice", 0) == chosen
    assert proof.kernels.get("slipstream::row_threshold", 0) == (4 + chosen if sampled else 0)


@pytest.mark.parametrize(
    ("plant", "kind", "rule"),
    [
        ("scalar_per_draft_step", "greedy", "tensor-literal"),  # founding case 2
        ("one_element_at_admission", "greedy", "pageable-copy"),
        ("length_read_back", "greedy", "host-read"),
        ("boolean_index_in_sampling", "sampled", "boolean-index"),
        ("positions_from_a_list", "greedy", "pageable-copy"),
        ("tree_mask_from_the_host", "tree", "host-read"),
        ("last_tokens_from_a_list", "requests", "pageable-copy"),  # founding case 4
        ("last_tokens_from_a_list", "requests-tree", "pageable-copy"),
        ("positions_from_device_scalars", "pictures", "tensor-from-scalars"),  # founding case 1
        ("grids_read_back", "pictures", "host-read"),
        ("embeddings_as_they_came", "pictures", "pageable-copy"),
        ("embeddings_put_by_their_marks", "pictures-hybrid", "boolean-index"),
        ("first_visible_pages_listed", "windows", "host-read"),
        ("drafts_counted_by_the_host", "requests", "host-read"),
        ("lengths_from_the_host", "scheduled", "host-read"),
    ],
)
def test_a_fault_put_back_turns_it_red(plant: str, kind: str, rule: str) -> None:
    proof = prove(TARGET, args=[kind, f"tests.support.plants:{plant}"])
    assert proof.exit_code == 1, proof.table()
    assert {f.rule for f in proof.report.findings} == {rule}
    assert all("plants.py" in str(f.site) for f in proof.report.findings)


def test_trees_and_windows_are_clean_together() -> None:
    proof = prove(TARGET, args=["windows-tree"])
    assert proof.exit_code == 0, proof.table()
    assert proof.kernels["slipstream::compact_path"] == 2 * 2, "the cache of each kind of layers"


def test_an_unreached_kernel_is_no_proof() -> None:
    assert prove(TARGET, kernels=["slipstream::no_such_kernel"]).exit_code == 2
