"""The demo: what the methods do to a real model on real text, in a few minutes on a laptop."""

from .run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
