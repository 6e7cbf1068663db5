"""From records to events: what a collected launch, an acknowledgement, a cut or an abort does to requests.

A record counts only if its slot still belongs to the generation it names. Tokens count as *returned* (for the
prefix cache) once acknowledged; requests without a text side acknowledge at once.
"""

from __future__ import annotations

from itertools import repeat

from slipstream.engine.batch import Queued
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Key, Sequence, State
from slipstream.logprobs import read_tokens
from slipstream.metrics import Metrics
from slipstream.types import FinishCode, FrameResult, TokenEvent

_REASON = {int(FinishCode.STOP): "stop", int(FinishCode.LENGTH): "length", int(FinishCode.INVALID): "error"}
_INVALID = int(FinishCode.INVALID)
TIMED_ONE_IN = 3
"""Of so many captured frames, how long one took is told to what chooses drafts."""
NOT_FINITE = (
    "no token could be chosen: the model's logits were not finite (NaN or infinite weights or activations), or every "
    "token was banned"
)

_NOTHING_ELSE = (repeat(None),) * (len(TokenEvent._fields) - 5)
"""finish_reason and what follows it, of an event that only brings tokens."""


class Collector:
    """Every request gets exactly one event with a finish reason, whatever ended it."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self.scheduler = scheduler
        self.metrics = metrics
        self.closed: dict[Key, Sequence] = {}
        """Closed since this was last emptied, for their statistics."""
        config = scheduler.config
        self._survivals = config.num_drafts if config.confidence_schedule else 0
        self._stride = 1 + (config.tree_depth or config.num_drafts)
        self._late = config.confidence_schedule or config.late_counts

    def take(self, result: FrameResult, arrived: int) -> list[TokenEvent]:
        """Apply the records of one launch, here since `arrived` on perf_counter_ns; then release what waited for it."""
        queued, width, taken = self.scheduler.queued, 0, None
        if queued and queued[0].launch == result.seq:
            frame = queued.popleft()
            width, taken = frame.width, self._take_steady(frame, result)
        events, accepted = self._take_each(result, width) if taken is None else taken
        adaptive = self.scheduler.adaptive
        if adaptive is not None:
            seconds = result.seconds
            if adaptive.costs is not None:  # a sample of the times will do: they take the host's
                start, until = (0, 0) if result.seq % TIMED_ONE_IN else self.metrics.span(result, arrived)
                seconds = (until - start) / 1e9
            adaptive.collected(result.seq, accepted, seconds)
        self.scheduler.settle(result.seq)
        return events

    def _take_steady(self, frame: Queued, result: FrameResult) -> tuple[list[TokenEvent], tuple[int, ...]] | None:
        """`_take_each` for a frame in which each member got tokens, none ended, and nothing else was asked for.

        The same by columns, in a third of the time. None, and nothing done, where it is not such a frame.
        """
        batch = frame.batch
        members, flags = batch.members, batch.flags
        if self._late or flags.masked or result.logprobs is not None or frame.left != self.scheduler.left:
            return None
        if len(result.slots) != len(batch.slots):  # ends of prompts
            return None
        records = result.records[: len(members)] if batch.padding else result.records
        generations, counts, accepted, verified, finishes, next_drafts, *tokens = zip(*records, strict=True)
        if any(finishes) or not all(counts) or generations != batch.generations:
            return None
        if sum(counts) != sum(accepted) + len(members):
            return None  # a round that is none of `round_kinds`
        stride, width = self._stride, frame.width
        if width == 1 and not any(verified):
            new: list[tuple[int, ...]] = [*zip(tokens[0], strict=True)]
            self.metrics.tally[0] += len(members)
            for seq, token, drafts in zip(members, tokens[0], next_drafts, strict=True):
                seq.queued -= 1  # as `Sequence.advanced`, without the call
                seq.ahead -= 1
                seq.length += 1
                seq.wanted = 1 + (drafts if drafts < seq.num_drafts else seq.num_drafts)
                seq.tally[0] += 1
                seq.outputs.append(token)
        else:
            new = [row[:n] for row, n in zip(zip(*tokens, strict=True), counts, strict=True)]
            which = [drafted * stride + n for drafted, n in zip(verified, accepted, strict=True)]
            tally = self.metrics.tally
            for seq, n, drafts, kind, some in zip(members, counts, next_drafts, which, new, strict=True):
                most = width if width < seq.most_tokens else seq.most_tokens
                assert n <= most, f"{seq.key}: {n} tokens of at most {most}"
                seq.queued -= 1
                seq.ahead -= most
                seq.length += n
                seq.wanted = 1 + (drafts if drafts < seq.num_drafts else seq.num_drafts)
                seq.tally[kind] += 1
                tally[kind] += 1
                seq.outputs.extend(some)
        fields = zip(batch.request_ids, batch.children, new, accepted, verified, *_NOTHING_ELSE, strict=False)
        # TokenEvent's own constructor takes twice as long.
        return [*map(tuple.__new__, repeat(TokenEvent), fields)], accepted

    def _take_each(self, result: FrameResult, width: int) -> tuple[list[TokenEvent], tuple[int, ...]]:
        """Events of a launch and accepted drafts of its rounds, record by record. width: of its decode frame."""
        events: list[TokenEvent] = []
        rounds = list[int]()
        running, decoded = self.scheduler.running, result.decoded
        survivals, late, stride = self._survivals, self._late, self._stride
        event = tuple.__new__
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
                seq.advanced(width, n)
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
                rounds.append(accepted)
                if n == accepted + 1:
                    kind = drafted * stride + accepted
                    seq.tally[kind] += 1
                    self.metrics.tally[kind] += 1
                else:
                    seq.counted.add_round(drafted, accepted, n)
                    self.metrics.rounds.add_round(drafted, accepted, n)
            if len(tokens) > n:
                del tokens[n:]
            seq.outputs += tokens
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
        return events, tuple(rounds)

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
        seq.told = max(seq.told, upto)
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
        seq.told = keep
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
        self.scheduler.leave(seq)
        seq.state = State.ENDED
        if seq.acked == len(seq.outputs):
            self._close(seq)

    def _close(self, seq: Sequence) -> None:
        self.scheduler.close(seq)
        self.closed[seq.key] = seq
