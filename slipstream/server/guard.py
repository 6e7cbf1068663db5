"""What stands before every route: API keys, the cap on bodies, a request id."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence
from typing import Any

from slipstream.server.replies import as_json, error_body

MAX_BODY_BYTES = 4 << 20
OPEN_ROUTES = ("/health",)


class Guard:
    """ASGI middleware. keys: any one of them opens all routes; none: all are open."""

    def __init__(self, app: Any, keys: Sequence[str], max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._most = max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = f"req-{uuid.uuid4().hex}"
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        if scope["path"] not in OPEN_ROUTES and not self._allowed(headers.get(b"authorization", b"")):
            error = error_body("a valid API key is needed: Authorization: Bearer KEY", "authentication_error")
            await _refuse(answer, 401, error, [(b"www-authenticate", b"Bearer")])
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._most:
            await _refuse(answer, 413, self._too_large())
            return
        await self.app(scope, _Capped(receive, self._most), answer)

    def _allowed(self, header: bytes) -> bool:
        """Digests of all keys are compared, in constant time: neither length nor content shows in the time taken."""
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        same = [hmac.compare_digest(given, known) for known in self._keys]
        return not self._keys or (scheme.lower() == b"bearer" and any(same))

    def _too_large(self) -> dict[str, Any]:
        return error_body(f"the body is larger than {self._most} bytes", "invalid_request_error")


class BodyTooLargeError(Exception):
    """A body without a length header went beyond the cap."""


class _Capped:
    def __init__(self, receive: Any, most: int) -> None:
        self._receive, self._left = receive, most

    async def __call__(self) -> Any:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise BodyTooLargeError
        return message


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _refuse(send: Any, status: int, body: dict[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    start = {
        "type": "http.response.start", "status": status,
        "headers": [(b"content-type", b"application/json"), (b"connection", b"close"), *headers],
    }  # fmt: skip
    await send(start)
    await send({"type": "http.response.body", "body": as_json(body)})
