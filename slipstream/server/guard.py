"""What stands before every route: API keys, caps on bodies, foreign web pages, a request id, the line in the log."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slipstream.server import logs
from slipstream.server.replies import as_json, error_body
from slipstream.server.telemetry import Telemetry

MAX_BODY_BYTES = 4 << 20
BODY_SECONDS = 60.0
SWALLOW_SECONDS = 2.0
OPEN_ROUTES = ("/health",)
QUIET_ROUTES = ("/health", "/metrics", "/stats")
"""Asked every few seconds: logged only when they fail."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """ASGI middleware. keys: any one of them opens all routes; none: all are open.

    A client may name its request (x-request-id); the name comes back and stands in the log.
    """

    def __init__(
        self, app: Any, keys: Sequence[str], telemetry: Telemetry, *,
        max_body_bytes: int = MAX_BODY_BYTES, body_seconds: float = BODY_SECONDS,
    ) -> None:  # fmt: skip
        self.app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._telemetry = telemetry
        self._most, self._seconds = max_body_bytes, body_seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        state = scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        status, began = 0, time.monotonic()

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if not await self._refused(scope, headers, receive, answer):
                await self.app(scope, _Capped(receive, self._most, began + self._seconds), answer)
        except Exception:  # the client has its answer, with the request id to ask for this
            logs.error("internal error", trace=True, request_id=request_id)
            if not status:
                await _refuse(answer, 500, error_body(f"internal error in {request_id}", "server_error"))
        finally:
            if status:  # 0: the client left before there was an answer
                self._telemetry.responses[status] += 1
            if status >= 400 or scope["path"] not in QUIET_ROUTES:
                summary = state["summary"]() if "summary" in state else {}
                logs.info(
                    "request", request_id=request_id, method=scope["method"], path=scope["path"][:200], status=status,
                    seconds=round(time.monotonic() - began, 4), **summary,
                )  # fmt: skip

    async def _refused(self, scope: Any, headers: dict[bytes, bytes], receive: Any, answer: Any) -> bool:
        if _foreign(headers):
            error = error_body("pages of another origin may not use this server", "invalid_request_error")
            await _swallow(receive, self._most)
            await _refuse(answer, 403, error)
            return True
        if scope["path"] not in OPEN_ROUTES and not self._allowed(headers.get(b"authorization", b"")):
            error = error_body("a valid API key is needed: Authorization: Bearer KEY", "authentication_error")
            challenges = [(b"www-authenticate", b"Bearer")]
            if scope["path"] == "/":  # a browser asks for it; the user name is ignored
                challenges.append((b"www-authenticate", b'Basic realm="slipstream: the API key as password"'))
            await _swallow(receive, self._most)
            await _refuse(answer, 401, error, challenges)
            return True
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._most:
            error = error_body(f"the body is larger than {self._most} bytes", "invalid_request_error")
            await _swallow(receive, 8 * self._most)
            await _refuse(answer, 413, error)
            return True
        return False

    def _allowed(self, header: bytes) -> bool:
        """Digests of all keys are compared, in constant time: neither length nor content shows in the time taken."""
        scheme, _, key = header.partition(b" ")
        kind, key = scheme.lower(), key.strip()
        if kind == b"basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                key = b""
        given = _digest(key)
        same = [hmac.compare_digest(given, known) for known in self._keys]
        return not self._keys or (kind in (b"bearer", b"basic") and any(same))


class BodyTooLargeError(Exception):
    """A body without a length header went beyond the cap."""


class BodyTooSlowError(Exception):
    """The body did not come in time."""


class _Capped:
    """receive, with a cap on the bytes of the body and a time by which it must be here (time.monotonic)."""

    def __init__(self, receive: Any, most: int, until: float) -> None:
        self._receive, self._most, self._left, self._until = receive, most, most, until
        self._whole = False

    async def __call__(self) -> Any:
        if self._whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            raise BodyTooSlowError from None
        self._whole = not message.get("more_body", False)
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            if not self._whole:
                await _swallow(self._receive, 8 * self._most)
            raise BodyTooLargeError
        return message


async def _swallow(receive: Any, most: int) -> None:
    """Read on for a moment, and no more than `most` bytes: a client that is cut off while it sends never sees why."""
    try:
        async with asyncio.timeout(SWALLOW_SECONDS):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        pass


def _foreign(headers: dict[bytes, bytes]) -> bool:
    """A browser says that a page of another site asks: it could spend the user's machine, or a key the browser keeps.

    Such a page cannot set headers of its own, so a proxy's x-forwarded-host can be believed here.
    """
    origin = headers.get(b"origin")
    hosts = (headers.get(b"host"), headers.get(b"x-forwarded-host"))
    return origin is not None and urlsplit(origin.decode("latin-1")).netloc.encode("latin-1") not in hosts


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _refuse(send: Any, status: int, body: dict[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    start = {
        "type": "http.response.start", "status": status,
        "headers": [(b"content-type", b"application/json"), (b"connection", b"close"), *headers],
    }  # fmt: skip
    await send(start)
    await send({"type": "http.response.body", "body": as_json(body)})
