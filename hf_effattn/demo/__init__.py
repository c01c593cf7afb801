"""The demo: one long text, read with exact and with clustered attention, in a minute on two processor cores."""

from .picture import draw_demo
from .run import DemoResult, run_demo, words

__all__ = ["DemoResult", "draw_demo", "run_demo", "words"]
