"""The command line: arguments are read here, the work is done in the library."""

from .app import app

__all__ = ["app"]
