"""Layouts against one process: the config's model, shrunk, takes the same steps under each."""

from rostra.verify.check import Verification, verify
from rostra.verify.compare import Distance
from rostra.verify.layouts import NAMED, parse
from rostra.verify.show import show
from rostra.verify.work import Checked

__all__ = ["NAMED", "Checked", "Distance", "Verification", "parse", "show", "verify"]
