"""`python -m archipel`."""

from .cli import main

main()
