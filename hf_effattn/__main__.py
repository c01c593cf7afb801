"""`python -m hf_effattn`: the same commands as `effattn`."""

from .cli import app

app(prog_name="python -m hf_effattn")
