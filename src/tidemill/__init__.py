"""Tidemill: RL post-training in which trainer and rollout engine take turns on the same accelerators."""

__version__ = "0.1.0"
