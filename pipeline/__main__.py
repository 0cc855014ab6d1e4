"""`python -m pipeline` is the console script `margrpo`."""

from pipeline.cli import main

main()
