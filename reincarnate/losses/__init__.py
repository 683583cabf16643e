"""Losses: pure functions, batched in, per example out."""
