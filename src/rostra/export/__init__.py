"""What a finished run becomes: merged with its base, and, later, other formats."""
