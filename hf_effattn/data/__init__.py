"""Readers of data sets, for the training scripts."""
