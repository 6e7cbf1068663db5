"""Log-probabilities of tokens on their way from the device to a request. Plain Python and numpy.

They are the model's own: the log-softmax of its logits before penalties, biases, masks, temperature and filters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_LOGPROBS = 20
"""Most alternatives per token: the width of a table on the device."""

TOKEN_COLUMNS = 2 + 2 * MAX_LOGPROBS
"""Numbers of a token in that table: its log-probability, its rank, the ids of the likeliest tokens, theirs. All int64;
log-probabilities are float64 bit patterns."""

PROMPT_ROWS = 128
"""Rows of a prompt whose logits are made at once, where its log-probabilities are asked for."""


class TokenLogprob(NamedTuple):
    """Of one token: its log-probability; its rank, 1 for the likeliest; top: ids and log-probabilities of the likeliest
    tokens, in order."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def read_tokens(table_NC: npt.NDArray[np.int64], top: int) -> tuple[TokenLogprob, ...]:
    """table_NC: rows of TOKEN_COLUMNS. top: alternatives that were asked for; fewer where the vocabulary is smaller."""
    own = table_NC[:, 0].view(np.float64) if table_NC.shape[0] else np.zeros(0)
    ids = table_NC[:, 2 : 2 + top].tolist()
    values = np.ascontiguousarray(table_NC[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + top]).view(np.float64).tolist()
    return tuple(
        TokenLogprob(x, rank, tuple((i, v) for i, v in zip(row_ids, row_values, strict=True) if i >= 0))
        for x, rank, row_ids, row_values in zip(own.tolist(), table_NC[:, 1].tolist(), ids, values, strict=True)
    )


class FrameLogprobs(NamedTuple):
    """Tables of one launch, int64: tokens of its decode records, `width` rows each; of the records of prompts that
    ended in it; of its prompt rows. Empty where nobody asked."""

    decode_NC: npt.NDArray[np.int64]
    width: int
    ends_NC: npt.NDArray[np.int64]
    prompt_NC: npt.NDArray[np.int64]

    def of_record(self, i: int, decoded: int, count: int, top: int) -> tuple[TokenLogprob, ...]:
        """The `count` tokens of record i, of which the first `decoded` are of decode slots."""
        if i < decoded:
            return read_tokens(self.decode_NC[i * self.width : i * self.width + count], top)
        return read_tokens(self.ends_NC[i - decoded : i - decoded + count], top)
