"""Documents that say the same as others, and those that hold evaluation sets.

`HashWriter` writes what each task's documents bring to the search, `find_duplicates` decides once
over all of them; `Contamination` looks at one text at a time.
"""

from __future__ import annotations

from rostra.data.duplicates.clusters import duplicates
from rostra.data.duplicates.contamination import Contamination
from rostra.data.duplicates.hash_files import HashWriter, find_duplicates
from rostra.data.duplicates.minhash import MinHash

__all__ = ["Contamination", "HashWriter", "MinHash", "duplicates", "find_duplicates"]
