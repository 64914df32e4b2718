"""`python -m cerebras.pytorch.cli` is the command `cstorch`."""

from . import main

main(prog_name="cstorch")
