"""The command `effattn`. It is no part of the package, whose import takes seconds: the demo says so before it."""

import sys


def main() -> None:
    """Run `effattn`."""
    if sys.argv[1:2] == ["demo"]:
        print("The demo takes about a minute on two processor cores. Importing torch and transformers.", flush=True)
    from hf_effattn.cli import app

    app(prog_name="effattn")
