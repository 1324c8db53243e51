"""What a finished run becomes: merged with its base, and, later, other formats."""

from rostra.export.agreement import MergeFailed
from rostra.export.merge import merge
from rostra.export.run import merge_folders, merge_run
from rostra.export.updates import Weighted

__all__ = ["MergeFailed", "Weighted", "merge", "merge_folders", "merge_run"]
