"""Verification: which drafts are accepted and which tokens a round emits."""

from slipstream.verify.core import verify
from slipstream.verify.rows import DenseQ, OneHot, Verdict, VerifyRows

__all__ = ["DenseQ", "OneHot", "Verdict", "VerifyRows", "verify"]
