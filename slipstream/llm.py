"""The offline facade: wires the rooms, text in, text out. Public: `LLM`."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.answers import USUAL, Answer, Prepared, Prompt, Service, default_params, prepare
from slipstream.build import Built, build
from slipstream.config import LLMConfig
from slipstream.engine.loop import EngineCore
from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.models.mrope import Media, media_prompt
from slipstream.outputs import RequestOutput, StreamChunk
from slipstream.sampling.rng import request_key
from slipstream.text import Tokenizer
from slipstream.text.tools import offered, read_tools, usual_format
from slipstream.types import SamplingParams, TokenEvent


@dataclass
class _Live:
    """A request in flight.

    unread: chunks that a caller of `stream` has not taken yet; None when nobody reads chunks.
    finished: where the output goes for the call of `generate` that waits for it, whoever turned the engine.
    """

    answer: Answer
    unread: deque[StreamChunk] | None = None
    finished: deque[RequestOutput] | None = None

    @property
    def output(self) -> RequestOutput:
        return self.answer.output


class LLM:
    """A model with its engine, in this process.

    model: a directory, a GGUF file, a hub id, or None for the default model. draft: None, "ngram", "suffix", "mtp" (the
    head in the model's checkpoint) or the path of a draft (recognised by its config); num_drafts: drafts per frame and
    slot (default 3). draft_tree: dict(topk=, levels=, total=), a tree of drafts instead of a chain (EAGLE-3, MTP).
    device: "auto", "cpu" or "cuda"; dtype: "auto", "float32", "float64" or "bfloat16"; run_ahead: frames the host may
    queue before it reads a result; adaptive: draft only as much as pays (`stats()["drafts"]` shows how much). Unknown
    options are errors.
    Everything is decided before anything is built: see `resolved`.

    Raises ConfigError for options that cannot work, ModelLoadError for models that cannot be loaded.
    Several threads may call at once: they take turns with the engine, and their requests share its frames.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = LLMConfig.from_options(model=model, **options)
        built: Built = build(self.config, _capture_bar if sys.stderr.isatty() else None)
        self.tokenizer: Tokenizer = built.tokenizer
        self.model_config = built.model.config
        self.generation_config: dict[str, Any] = dict(built.generation_config)
        self.resolved: dict[str, Any] = built.resolved
        self.notes: list[str] = built.notes
        self._built = built
        self._engine = EngineCore(built.engine_config, built.device, built.grammars)
        self._live: dict[str, _Live] = {}
        self._ids = itertools.count()
        self._turn = threading.RLock()  # whoever holds it may touch the engine and `_live`

    # -- public calls ---------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids), in one batch; results come in the order of the prompts.

        A prompt with pictures, or with embeddings of its own, is a mapping, see `models.mrope.media_prompt`:
        prompt_token_ids, and prompt_embeds [M, H], image_grid_thw, video_grid_thw where there are any.
        priority, one or one per prompt: lower ones are admitted first; cache_salt: cached prefixes are shared within
        one salt only. All prompts are checked before any runs: a bad one raises InvalidRequestError, nothing is lost.
        """
        batch = _as_batch(prompts)
        each = _as_params(params, len(batch), self.default_sampling_params)
        order = [priority] * len(batch) if isinstance(priority, int) else list(priority)
        if len(order) != len(batch):
            raise InvalidRequestError(f"{len(order)} priorities for {len(batch)} prompts; give one, or one per prompt")
        services = [Service(priority=p, cache_salt=cache_salt) for p in order]
        requests = [self._prepare(p, s, v) for p, s, v in zip(batch, each, services, strict=True)]
        ids: list[str] = []
        waiting: set[str] = set()
        done: dict[str, RequestOutput] = {}
        finished: deque[RequestOutput] = deque()
        bar = _Progress(len(requests), enabled=use_tqdm and len(requests) > 1)
        try:
            for r in requests:
                ids.append(self._submit(*r, finished=finished))
                waiting.add(ids[-1])
            while waiting:
                if not finished:
                    self._step()
                while finished:
                    output = finished.popleft()
                    waiting.discard(output.request_id)
                    done[output.request_id] = output
                    bar.advance(sum(len(o.token_ids) for o in output.outputs))
        finally:
            bar.close()
            for request_id in waiting:
                self.abort(request_id)
        return [done[i] for i in ids]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"} messages. tools, chat_template_kwargs:
        see `chat_prompt`; calls are in the answer's text, as the model writes them."""
        many = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        more = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        prompts: list[Prompt] = [self.chat_prompt(m, **more) for m in many]  # type: ignore[arg-type]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        tools: functions that the answer may call, as OpenAI's API has them. chat_template_kwargs: the template's.
        """
        said = [dict(m) for m in messages]
        said, shown = offered(self.tokenizer, said, read_tools(tools), tools, usual_format(self.tokenizer))
        text = self.tokenizer.apply_chat_template(
            said, add_generation_prompt=True, tools=shown, **(chat_template_kwargs or {})
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Yield chunks as frames are collected; leaving the iterator early aborts the request."""
        # Other calls may turn the engine between two chunks; what they bring for this request waits here.
        unread: deque[StreamChunk] = deque()
        request_id = self._submit(*self._prepare(prompt, params or self.default_sampling_params()), unread=unread)
        finished = False
        try:
            while not finished:
                with self._turn:
                    if not unread and request_id not in self._live:
                        return  # closed or aborted from elsewhere
                    if not unread:
                        self._step()
                while unread:
                    chunk = unread.popleft()
                    finished = chunk.output is not None
                    yield chunk
        finally:
            if not finished:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request; its slots return within `run_ahead` frames."""
        with self._turn:
            if self._live.pop(request_id, None) is None:
                return
            self._engine.abort(request_id)
            while self._engine.has_work and not self._live and not self._engine.dead:
                self._engine.step()

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise what `generate` would raise for this request; nothing runs."""
        self._prepare(prompt, params)

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's generation_config, where it names a temperature, top_k, top_p, min_p
        or repetition_penalty."""
        return default_params(self.generation_config)

    def stats(self) -> dict[str, Any]:
        """Engine counters, the seconds spent inside the device's frames, and what capturing them at start-up took
        ({"graphs", "seconds", "mib"}; None where nothing is captured), pages of layers with a sliding window
        ({"pages", "free", "held", "most_held"}; None without such layers), and saved states of recurrent layers
        ({"states", "free", "cached"}; None where none are saved)."""
        window, saved = self._engine.scheduler.ledger.window, self._engine.scheduler.ledger.saved
        return {
            **self._engine.metrics.snapshot(),
            "device_seconds": self._built.device.device_seconds,
            "capture": self.resolved["capture"],
            "window_pages": None if window is None else window.report(),
            "saved_states": None if saved is None else saved.report(),
        }

    def check_idle(self) -> None:
        """Assert that no request holds anything: free + cached = total in every pool."""
        self._engine.check_idle()

    def close(self) -> None:
        """Abort what is running. The object can be dropped afterwards."""
        for request_id in list(self._live):
            self.abort(request_id)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one request ----------------------------------------------------------------------------------------

    def _prepare(self, prompt: Prompt, params: SamplingParams, service: Service = USUAL) -> Prepared:
        """Text to ids, and every check that can refuse the request."""
        media, model = None, self._built.model
        if isinstance(prompt, Mapping):
            prompt, media = media_prompt(prompt, model.config, model.dtype)
            if media.embeds is not None and not self.resolved["embeds_bytes"]:
                raise UnsupportedError(
                    "prompt_embeds: this engine has no room for them; start it with prompt_embeds=True, which takes "
                    "some memory on the device and beside it"
                )
        made = prepare(prompt, params, self.tokenizer, self._built.limits, self._built.grammars, service)
        return made if media is None else made._replace(media=media)

    def _submit(
        self,
        text: str | None,
        ids: tuple[int, ...],
        params: SamplingParams,
        service: Service = USUAL,
        media: Media | None = None,
        *,
        unread: deque[StreamChunk] | None = None,
        finished: deque[RequestOutput] | None = None,
    ) -> str:
        request_id, limits = f"req-{next(self._ids)}", self._built.limits
        request = Prepared(text, ids, params, service, media)
        answer = Answer.begin(request_id, request, self.tokenizer, limits)
        children = answer.requests(request, limits, request_key(params.seed))
        with self._turn:
            self._live[request_id] = _Live(answer, unread, finished)
            try:
                for child in children:
                    self._engine.add(child)
            except InvalidRequestError:
                self.abort(request_id)  # its first children may be in already
                raise
        return request_id

    # -- the loop -------------------------------------------------------------------------------------------

    def _step(self) -> list[StreamChunk]:
        """One turn of the engine; its tokens become text here, and cuts go back at once."""
        chunks = []
        with self._turn:
            with _held_interrupts():
                events = self._engine.step()
            for event in events:
                live = self._live.get(event.request_id)
                if live is None or event.child not in live.answer.open:
                    continue
                chunk = self._take(live, event)
                chunks.append(chunk)
                if live.unread is not None:
                    live.unread.append(chunk)
                if live.finished is not None and chunk.output is not None:
                    live.finished.append(chunk.output)
        return chunks

    def _take(self, live: _Live, event: TokenEvent) -> StreamChunk:
        chunk, receipt = live.answer.take(event)
        if receipt is not None:
            tell = self._engine.cut if receipt.cut else self._engine.ack
            tell(event.request_id, receipt.child, receipt.upto)
        if chunk.output is not None:
            del self._live[event.request_id]
        return chunk


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Ctrl-C waits until the engine's step is whole: half a step would leave host and device in disagreement."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _as_batch(prompts: Any) -> list[Prompt]:
    """A list of prompts, each text or a list of token ids; arrays are taken as lists."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(
            f"prompts of type {type(prompts).__name__} must be text, token ids or a list of those"
        )
    items = [p.tolist() if hasattr(p, "tolist") else p for p in prompts]
    for p in items:
        if not isinstance(p, (str, int, list, tuple, Mapping)):
            raise InvalidRequestError(f"prompt {p!r} must be text or a list of token ids")
    if items and all(isinstance(p, int) for p in items):
        return [items]
    return items


def _as_params(params: Any, count: int, default: Any) -> list[SamplingParams]:
    if params is None:
        return [default()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    each = list(params)
    if len(each) != count:
        raise InvalidRequestError(f"{len(each)} sampling parameters for {count} prompts; give one, or one per prompt")
    return each


def _capture_bar(done: int, total: int) -> None:
    """A one-line bar on stderr while frames are captured at start-up."""
    filled = 30 * done // total
    sys.stderr.write(f"\r[{'#' * filled + '.' * (30 - filled)}] {done}/{total} frame graphs captured")
    sys.stderr.write("\n" if done == total else "")
    sys.stderr.flush()


class _Progress:
    """A one-line progress bar on stderr; silent when it is not a terminal."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self.total, self.done, self.tokens = total, 0, 0
        self.enabled = enabled and sys.stderr.isatty()

    def advance(self, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        if self.enabled:
            filled = 30 * self.done // self.total
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {self.done}/{self.total} requests, {self.tokens} tokens")
            sys.stderr.flush()

    def close(self) -> None:
        if self.enabled:
            sys.stderr.write("\n")
