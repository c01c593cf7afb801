"""The report: error, change of the output, time and memory of the methods, on one model and its user's inputs."""

from .measure import report
from .pictures import plot_attention
from .report import Report

__all__ = ["Report", "plot_attention", "report"]
