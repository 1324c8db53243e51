"""Readers of documents, a module a kind; `rostra.data.sources` has what they share."""
