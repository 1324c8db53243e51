"""What fits, how fast, at what price: memory and time of any layout on any hardware, before
anything is bought; the search over all layouts, and the explanation of what it found."""

from __future__ import annotations
