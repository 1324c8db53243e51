"""Adapters and quantised bases: what is trained beside a frozen model, and in how many bits
that model lies."""
