"""Reincarnate: reuse a policy that somebody already trained instead of training from scratch."""
