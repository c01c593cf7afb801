"""The report: error, change of the output, time and memory of the methods, on one model and its user's inputs."""

from .calibration import Calibration, calibrate
from .measure import report
from .pictures import plot_attention
from .report import Report

__all__ = ["Calibration", "Report", "calibrate", "plot_attention", "report"]
