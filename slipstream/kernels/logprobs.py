"""Log-probabilities of chosen tokens and of the likeliest ones beside them, into a table on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.logprobs import MAX_LOGPROBS

OP = "slipstream::"


@torch.library.custom_op(OP + "token_logprobs", mutates_args=("table_NC",))
def token_logprobs(
    table_NC: Tensor, first: int, logits_RV: Tensor, row_M: Tensor, token_M: Tensor, wanted_M: Tensor
) -> None:
    """Rows first, first + 1, ... of the table [N, TOKEN_COLUMNS], int64: see `slipstream.logprobs`.

    row_M: the logits that chose, or could have chosen, token_M. wanted_M: alternatives wanted plus one; 0: the table's
    row may hold anything. Of equal logits the lowest ids come first in no promised order; ranks count larger ones only.
    """
    vocab, top = logits_RV.shape[1], min(MAX_LOGPROBS, logits_RV.shape[1])
    x_MV = logits_RV[row_M].double()
    total_M1 = torch.logsumexp(x_MV, 1, keepdim=True)
    own_M1 = x_MV.gather(1, token_M.clamp(0, vocab - 1)[:, None])
    best_MK, id_MK = x_MV.topk(top, dim=1)
    table_MC = table_NC[first : first + row_M.shape[0]]
    table_MC[:, 0] = (own_M1 - total_M1)[:, 0].view(torch.int64)
    table_MC[:, 1] = (x_MV > own_M1).sum(1) + 1
    table_MC[:, 2 : 2 + MAX_LOGPROBS] = -1
    table_MC[:, 2 : 2 + top] = id_MK
    table_MC[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + top] = (best_MK - total_M1).view(torch.int64)


@token_logprobs.register_fake
def _(table_NC: Tensor, first: int, logits_RV: Tensor, row_M: Tensor, token_M: Tensor, wanted_M: Tensor) -> None:
    return None


@token_logprobs.register_kernel("cuda")
def _(table_NC: Tensor, first: int, logits_RV: Tensor, row_M: Tensor, token_M: Tensor, wanted_M: Tensor) -> None:
    from slipstream.kernels.jit import logprobs

    logprobs.launch_token_logprobs(
        table_NC, first, logits_RV.contiguous(), row_M.contiguous(), token_M.contiguous(), wanted_M.contiguous()
    )
