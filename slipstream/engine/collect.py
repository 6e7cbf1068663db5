"""From records to events: what a collected launch, an acknowledgement, a cut or an abort does to requests.

A record counts only if its slot still belongs to the generation it names. Tokens count as *returned* (for the
prefix cache) once acknowledged; requests without a text side acknowledge at once.
"""

from __future__ import annotations

from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Key, Sequence, State
from slipstream.logprobs import read_tokens
from slipstream.metrics import Metrics
from slipstream.types import FinishCode, FrameResult, Round, TokenEvent

_REASON = {int(FinishCode.STOP): "stop", int(FinishCode.LENGTH): "length", int(FinishCode.INVALID): "error"}
_INVALID = int(FinishCode.INVALID)
NOT_FINITE = (
    "no token could be chosen: the model's logits were not finite (NaN or infinite weights or activations), or every "
    "token was banned"
)


class Collector:
    """Every request gets exactly one event with a finish reason, whatever ended it."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self.scheduler = scheduler
        self.metrics = metrics
        self.closed: dict[Key, Sequence] = {}
        """Closed since this was last emptied, for their statistics."""
        config = scheduler.config
        self._survivals = config.num_drafts if config.confidence_schedule else 0
        self._late = config.confidence_schedule or config.late_counts

    def take(self, result: FrameResult) -> list[TokenEvent]:
        """Apply the records of one launch; then release what waited for it."""
        events: list[TokenEvent] = []
        rounds: list[Round] = []
        running, launch, decoded = self.scheduler.running, result.seq, result.decoded
        survivals, late = self._survivals, self._late
        event = tuple.__new__  # TokenEvent's own constructor takes twice as long
        if result.prompt:
            self._read_prompts(result)
        for i, (slot, record) in enumerate(zip(result.slots, result.records, strict=True)):
            generation, n, accepted, verified, finish, next_drafts, *tokens = record
            seq = running.get(slot)
            if seq is None or seq.generation != generation:
                continue  # the sink, or a frame that was queued before its slot ended
            wanted = 1 + (next_drafts if next_drafts < seq.num_drafts else seq.num_drafts)
            drafted = None
            if i < decoded:
                seq.advanced(launch, n)
                drafted = verified
            else:
                seq.prefilled = True
            if late:
                seq.noted(wanted, tokens[:survivals])
                del tokens[:survivals]
            else:
                seq.wanted = wanted
            if n == 0 and not finish:
                continue
            if drafted is not None and n:
                of = (drafted, accepted, n)
                rounds.append(of)
                seq.took(of)
            if len(tokens) > n:
                del tokens[n:]
            seq.outputs += tokens
            if not seq.request.needs_ack:
                seq.acked = len(seq.outputs)
            reason = error = None
            if finish:
                reason = _REASON[finish]
                if finish == _INVALID:
                    error, seq.tainted = NOT_FINITE, True
                self._end(seq, reason)
            elif drafted is None:
                self.scheduler.ledger.share_prompt(seq)
            if seq.grammar is not None and not finish:
                self._ask_masks(seq, result, i, wanted)
            request_id, child = seq.key
            values, of_prompt = None, None
            if result.logprobs is not None:
                if seq.request.params.logprobs is not None:
                    values = result.logprobs.of_record(i, decoded, n, seq.request.params.logprobs)
                if seq.reports_prompt:
                    of_prompt, seq.prompt_told = tuple(seq.prompt_logprobs), True
            events.append(
                event(
                    TokenEvent,
                    (request_id, child, tuple(tokens), accepted, drafted, reason, error, values, of_prompt),
                )
            )
        self.metrics.spec.add_rounds(rounds)
        if self.scheduler.adaptive is not None:
            self.scheduler.adaptive.collected(result.seq, rounds, result.seconds)
        self.scheduler.settle(launch)
        return events

    def _read_prompts(self, result: FrameResult) -> None:
        """Log-probabilities of the chunk's prompt rows, to the prompts that ask for them."""
        assert result.logprobs is not None
        row = 0
        for span in result.prompt:
            rows_NC = result.logprobs.prompt_NC[row : row + span.length]
            row += span.length
            seq = self.scheduler.running.get(span.slot)
            if seq is not None and seq.reports_prompt:
                # The row at position p is about the token at p + 1; the last one's is not of the prompt.
                most = len(seq.request.prompt_token_ids) - 1 - span.start
                top = seq.request.params.prompt_logprobs or 0
                seq.prompt_logprobs[span.start :] = read_tokens(rows_NC[:most], top)

    def _ask_masks(self, seq: Sequence, result: FrameResult, i: int, wanted: int) -> None:
        assert result.drafts is not None, "a launch with a grammar brings its drafts"
        parents = None if result.parents is None else result.parents[i][1:wanted]
        self.scheduler.desk.collected(seq, result.drafts[i][1:wanted], parents)

    def masks_in(self) -> list[TokenEvent]:
        """Take in masks that have come: their sequences go on, or end with an error."""
        ends = []
        for seq, error in self.scheduler.desk.arrived():
            if error is not None:
                ends.append(self.abort(seq.key, error))
            elif seq.state is State.HELD:
                self.scheduler.enqueue(seq)
        return [event for event in ends if event is not None]

    def ack(self, key: Key, upto: int) -> None:
        """The first `upto` output tokens are returned to the user. Unknown (ended) requests are ignored."""
        seq = self.scheduler.sequences.get(key)
        if seq is None:
            return
        assert upto <= len(seq.outputs), f"{upto} tokens acknowledged, {len(seq.outputs)} were sent"
        seq.acked = max(seq.acked, upto)
        if seq.state is State.ENDED and seq.acked == len(seq.outputs):
            self._close(seq)

    def cut(self, key: Key, keep: int, reason: str, error: str | None = None) -> TokenEvent | None:
        """End a request after its first `keep` output tokens; later ones never existed.

        Returns the final event, or None if it has had one (the device ended it first) or is unknown.
        """
        seq = self.scheduler.sequences.get(key)
        if seq is None:
            return None
        assert 0 <= keep <= len(seq.outputs), f"cut at {keep} of {len(seq.outputs)} tokens"
        del seq.outputs[keep:]
        seq.acked = keep
        if seq.state is State.ENDED:
            self._close(seq)
            return None
        self.metrics.count(f"finished_{reason}", 1)
        self._close(seq)
        return TokenEvent(request_id=key[0], child=key[1], tokens=(), finish_reason=reason, error=error)

    def abort(self, key: Key, error: str | None) -> TokenEvent | None:
        """End a request where it is; only returned tokens count."""
        seq = self.scheduler.sequences.get(key)
        return None if seq is None else self.cut(key, seq.acked, "error" if error else "abort", error)

    def _end(self, seq: Sequence, reason: str) -> None:
        """The device has ended it: frames in flight treat the slot as inactive, no drop is needed."""
        self.metrics.count(f"finished_{reason}", 1)
        del self.scheduler.running[seq.slot]
        seq.state = State.ENDED
        if seq.acked == len(seq.outputs):
            self._close(seq)

    def _close(self, seq: Sequence) -> None:
        self.scheduler.close(seq)
        self.closed[seq.key] = seq
