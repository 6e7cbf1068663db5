"""What makes a request acceptable, before it costs anybody anything."""

from __future__ import annotations

from slipstream.config import EngineConfig
from slipstream.errors import InvalidRequestError
from slipstream.types import Request


def check_request(request: Request, config: EngineConfig) -> int:
    """Drafts per frame of the request. Raises InvalidRequestError with value and limit.

    A request that passes always fits: the configuration has pages for one sequence of max_model_len tokens
    and one frame of num_drafts + 1 rows.
    """
    n, limit = len(request.prompt_token_ids), config.max_model_len
    if n == 0:
        raise InvalidRequestError("the prompt has 0 tokens; it needs at least 1")
    if n > limit - 1:
        raise InvalidRequestError(
            f"the prompt has {n} tokens; the limit is {limit - 1} (max_model_len={limit} less one for the output)"
        )
    if not n < request.max_len <= limit:
        raise InvalidRequestError(
            f"max_len={request.max_len} must be above the {n} prompt tokens and at most max_model_len={limit}"
        )
    low = min(request.prompt_token_ids)
    if low < 0:
        raise InvalidRequestError(f"the prompt has token id {low}; ids start at 0")
    if len(request.stop_ids) > config.max_stop_ids:
        raise InvalidRequestError(f"{len(request.stop_ids)} stop token ids; the limit is {config.max_stop_ids}")
    drafts = config.num_drafts if request.num_drafts is None else request.num_drafts
    if not 0 <= drafts <= config.num_drafts:
        raise InvalidRequestError(f"num_drafts={drafts} must be from 0 to {config.num_drafts}, the engine's")
    return drafts
