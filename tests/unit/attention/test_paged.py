"""Paged attention against the dense reference: ragged rows, gathers and runs, poison, and grouping of rows."""

from __future__ import annotations

import pytest
import torch

from slipstream.attention.dense import DenseCausal
from slipstream.attention.paged import PagedAttention, RowGrid, cache_slots, padded_columns, padded_rows
from slipstream.memory.kv import KVPages

N, K, D = 6, 2, 16


def pages(page_size: int, dtype: torch.dtype, total: int = 64) -> KVPages:
    return KVPages(
        num_layers=1, num_pages=total, page_size=page_size, num_kv_heads=K, head_dim=D, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip


class Slots:
    """Random sequences in a paged cache, with the dense answer beside it."""

    def __init__(self, lengths: list[int], page_size: int, dtype: torch.dtype, *, runs: bool, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        total = sum(-(-(n + 8) // page_size) for n in lengths) + 4
        self.kv = pages(page_size, dtype, total)
        self.q = [torch.randn(n, N, D, generator=g, dtype=torch.float64).to(dtype) for n in lengths]
        self.k = [torch.randn(n, K, D, generator=g, dtype=torch.float64).to(dtype) for n in lengths]
        self.v = [torch.randn(n, K, D, generator=g, dtype=torch.float64).to(dtype) for n in lengths]
        ids = list(range(1, total + 1)) if runs else (torch.randperm(total, generator=g) + 1).tolist()
        width = max(-(-(n + 8) // page_size) for n in lengths)
        self.table = torch.zeros(len(lengths) + 1, width, dtype=torch.int64)
        for i, n in enumerate(lengths):
            for j in range(-(-n // page_size)):
                self.table[i + 1, j] = ids.pop(0)

    def attend(
        self,
        rows: list[tuple[int, int]],
        first_page: tuple[int, ...] = (),
        reach: tuple[int, ...] = (),
        window: int = 0,
        poison: bool = False,
    ) -> torch.Tensor:
        """rows: (sequence, how many of its last positions); earlier ones are written to the cache first.

        poison: what no row can see is NaN, and table entries of such pages are the sink.
        """
        slots, pos, q, k, v = [], [], [], [], []
        width = max(w for _, w in rows)
        for i, w in rows:
            n = len(self.q[i])
            early = torch.arange(n - w)
            where = cache_slots(self.table, torch.full_like(early, i + 1), early, self.kv.page_size)
            self.kv.flat[0][0][where] = self.k[i][: n - w]
            self.kv.flat[0][1][where] = self.v[i][: n - w]
            if poison:
                seen = max(0, n - w - window + 1)
                self.kv.flat[0][0][where[:seen]] = self.kv.flat[0][1][where[:seen]] = float("nan")
                self.table[i + 1, : seen // self.kv.page_size] = 0
                self.kv.data[:, :, 0] = float("nan")
            slots += [i + 1] * w
            pos += range(n - w, n)
            q.append(self.q[i][n - w :]), k.append(self.k[i][n - w :]), v.append(self.v[i][n - w :])
        slot_R, pos_R = torch.tensor(slots), torch.tensor(pos)
        start, row_of, cells = 0, [], []
        for b, (_, w) in enumerate(rows):
            row_of.append([start + min(d, w - 1) for d in range(width)])
            cells += [b * width + d for d in range(w)]
            start += w
        grid = RowGrid(
            pos_BW=pos_R[torch.tensor(row_of)], row_of_BW=torch.tensor(row_of), cell_of_R=torch.tensor(cells)
        )
        attention = PagedAttention(
            self.kv, grid=grid, cache_slot_R=cache_slots(self.table, slot_R, pos_R, self.kv.page_size),
            table_BP=self.table[torch.tensor([i + 1 for i, _ in rows])], len_ub=int(pos_R.max()) + 1,
            heads_per_kv=N // K, mask_dtype=self.kv.data.dtype, first_page=first_page, reach=reach, window=window,
        )  # fmt: skip
        return attention.attend(0, torch.cat(q), torch.cat(k), torch.cat(v))

    def dense(self, i: int, w: int, window: int = 0) -> torch.Tensor:
        pos = torch.arange(len(self.q[i]))
        return DenseCausal(pos, (window,)).attend(0, self.q[i], self.k[i], self.v[i])[-w:]


@pytest.mark.parametrize("page_size", [1, 5, 16, 32])
@pytest.mark.parametrize("runs", [False, True])
def test_ragged_rows_equal_dense(page_size: int, runs: bool) -> None:
    s = Slots([3, 70, 33, 1], page_size, torch.float64, runs=runs)
    out = s.attend([(1, 4), (0, 1), (3, 1), (2, 2)])
    want = torch.cat([s.dense(1, 4), s.dense(0, 1), s.dense(3, 1), s.dense(2, 2)])
    assert torch.allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("window", [1, 4, 30, 100])
def test_windows_equal_dense_and_read_nothing_behind_them(page_size: int, window: int) -> None:
    """Rows of several slots, drafted ones too; pages behind every row's window hold NaN or are gone."""
    s = Slots([3, 70, 33, 1, 58], page_size, torch.float64, runs=False)
    out = s.attend([(1, 4), (0, 1), (3, 1), (2, 2), (4, 40)], window=window, poison=True)
    want = torch.cat([s.dense(i, w, window) for i, w in ((1, 4), (0, 1), (3, 1), (2, 2), (4, 40))])
    assert torch.allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("window", [40, 300, 512])
def test_windows_do_not_depend_on_grouping(window: int) -> None:
    """bf16, bit for bit, as without a window: alone or in a batch, one row or several."""
    lengths = [130, 61, 9, 700, 1777]
    batch = Slots(lengths, 32, torch.bfloat16, runs=False)
    taken = [(0, 8), (1, 3), (2, 1), (3, 8), (4, 5)]
    out, at = batch.attend(taken, window=window), 0
    for i, w in taken:
        for alone in range(1, w + 1):
            assert torch.equal(batch.attend([(i, alone)], window=window), out[at + w - alone : at + w]), (i, alone)
        at += w


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_a_lone_run_is_read_in_place(length: int) -> None:
    s = Slots([length], 32, torch.float64, runs=True)
    w = min(3, length)
    assert torch.allclose(s.attend([(0, w)], (int(s.table[1, 0]),)), s.dense(0, w), atol=1e-12)


def test_foreign_and_sink_pages_may_hold_nan() -> None:
    s = Slots([40, 3], 16, torch.float64, runs=False)
    owned = set(s.table.flatten().tolist()) - {0}
    for page in range(s.kv.num_pages + 1):
        if page not in owned:
            s.kv.data[:, :, page] = float("nan")
    out = s.attend([(0, 2), (1, 1)])
    assert torch.allclose(out, torch.cat([s.dense(0, 2), s.dense(1, 1)]), atol=1e-12)


@pytest.mark.parametrize("chunk", [11, 32, 33, 65, 129, 257, 259])
def test_a_prompts_rows_do_not_depend_on_the_chunk(chunk: int) -> None:
    """bf16, bit for bit: rows read in one long chunk equal the same rows read alone."""
    s = Slots([700], 32, torch.bfloat16, runs=True)
    run = (int(s.table[1, 0]),)
    whole = s.attend([(0, chunk)], run)
    for alone in (1, 2, 5, 8):
        assert torch.equal(s.attend([(0, alone)], run), whole[-alone:])


def test_columns_and_rows_keep_out_of_the_blocks_that_differ() -> None:
    for length in range(1, 3000):
        columns = padded_columns(length)
        assert columns >= length and columns % 32 == 0 and columns % 512 <= 192
    for group in (1, 2, 3, 4, 8):
        for width in range(1, 700):
            queries = padded_rows(width, group) * group
            tail = queries % (32 if queries < 192 else 64 if queries < 768 else 256)
            assert queries >= max(8, width * group) and (tail == 0 or tail >= 8)


@pytest.mark.parametrize(("row", "wide"), [(870, 928), (468, 480), (914, 928), (782, 1024), (1351, 1440), (387, 576)])
def test_a_row_of_the_default_model_keeps_its_bits(monkeypatch: pytest.MonkeyPatch, row: int, wide: int) -> None:
    """Heads of 64, three to a key head, bf16: alone, among the last rows of a prompt chunk, and beside a slot so long
    that its columns are more. A last block of 384 to 480 columns is summed in another order than a whole one, which
    shows in one of some thousand numbers."""
    for name, value in (("N", 9), ("K", 3), ("D", 64)):
        monkeypatch.setattr(f"{__name__}.{name}", value)
    for seed in range(12):
        alone = Slots([row + 1], 32, torch.bfloat16, runs=False, seed=seed)
        pair = Slots([row + 1, wide], 32, torch.bfloat16, runs=False, seed=seed + 100)
        for name in ("q", "k", "v"):
            getattr(pair, name)[0] = getattr(alone, name)[0]
        want = alone.attend([(0, 1)])
        assert torch.equal(pair.attend([(0, 1), (1, 1)])[:1], want), "beside a longer slot"
        for width in (4, 33, 64, 96):
            assert torch.equal(alone.attend([(0, width)])[-1:], want), f"one of {width} rows"


@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize("dim", [192, 256, 512])
def test_wide_heads_do_not_depend_on_grouping(monkeypatch: pytest.MonkeyPatch, dim: int, window: int) -> None:
    """bf16, bit for bit, where torch's kernel takes other ways for more of the last rows of a block."""
    for name, value in (("N", 4), ("K", 1), ("D", dim)):
        monkeypatch.setattr(f"{__name__}.{name}", value)
    batch = Slots([130, 61, 777], 32, torch.bfloat16, runs=True)
    taken = [(0, 8), (1, 3), (2, 5)]
    out, at = batch.attend(taken, window=window), 0
    for i, w in taken:
        for alone in range(1, w + 1):
            assert torch.equal(batch.attend([(i, alone)], window=window), out[at + w - alone : at + w]), (i, alone)
        at += w
    long = Slots([700], 32, torch.bfloat16, runs=True)
    whole = long.attend([(0, 33)], window=window)
    for alone in (1, 2, 5, 8):
        assert torch.equal(long.attend([(0, alone)], window=window), whole[-alone:])


@pytest.mark.parametrize("page_size", [8, 32, 256])
def test_results_do_not_depend_on_grouping(page_size: int) -> None:
    """bf16, bit for bit: one row or eight, alone or in a batch, gathered or in place, few columns or many."""
    lengths = [130, 61, 9, 300, 777]
    batch = Slots(lengths, page_size, torch.bfloat16, runs=True)
    taken = [(0, 8), (1, 3), (2, 1), (3, 8), (4, 5)]
    out = batch.attend(taken)
    runs = tuple(int(batch.table[i + 1, 0]) for i, _ in taken)
    long = [(3, 8), (4, 5)]
    in_place = batch.attend(long, runs[3:], (lengths[3], lengths[4]))
    assert torch.equal(in_place, out[-13:]), "one call per slot, each with its own columns"
    at = 0
    for i, w in taken:
        for alone in range(1, w + 1):
            run = (int(batch.table[i + 1, 0]),)
            assert torch.equal(batch.attend([(i, alone)], run), out[at + w - alone : at + w]), (i, alone)
            assert torch.equal(batch.attend([(i, alone)]), out[at + w - alone : at + w]), (i, alone)
        at += w


def test_positions_past_the_table_go_to_the_sink() -> None:
    table = torch.tensor([[0, 0], [4, 5]])
    slot, pos = torch.tensor([1, 1, 1, 0]), torch.tensor([3, 7, 8, 100])
    assert cache_slots(table, slot, pos, 4).tolist() == [4 * 4 + 3, 5 * 4 + 3, 0, 0]
