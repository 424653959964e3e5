"""`python -m pyspac`: the command line."""

from pyspac.cli import main

main()
