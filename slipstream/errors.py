"""Errors a user can cause. Each message names the value, the limit and what to do."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """An option, or a pair of options, that cannot work. Raised at start-up."""


class ModelLoadError(SlipstreamError, ValueError):
    """A model, draft or tokenizer that is missing, damaged or of an unsupported kind."""


class InvalidRequestError(SlipstreamError, ValueError):
    """A request outside the limits; other requests are not affected."""


class UnsupportedError(SlipstreamError, ValueError):
    """A feature that is known by name but is not built (yet)."""


class RequestFailedError(SlipstreamError, RuntimeError):
    """A fault inside one request (tokenizer, processor); it ends alone."""


class EngineDeadError(SlipstreamError, RuntimeError):
    """The engine stopped on a device fault; every request in flight has failed."""
