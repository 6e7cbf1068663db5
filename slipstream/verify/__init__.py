"""Verification: which drafts are accepted and which tokens a round emits."""

from slipstream.verify.core import verify
from slipstream.verify.rows import DenseQ, OneHot, Verdict, VerifyRows
from slipstream.verify.tree import Siblings, TreeQ, TreeRows, TreeVerdict, verify_tree

__all__ = [
    "DenseQ",
    "OneHot",
    "Siblings",
    "TreeQ",
    "TreeRows",
    "TreeVerdict",
    "Verdict",
    "VerifyRows",
    "verify",
    "verify_tree",
]
