"""A rank of any layout, built and run in this process without any memory: with fake tensors."""

from rostra.dry_run.rank import DryRun, dry_run, fake_group, fake_rank
from rostra.dry_run.watch import Watch

__all__ = ["DryRun", "Watch", "dry_run", "fake_group", "fake_rank"]
