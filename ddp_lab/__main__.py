"""`python -m ddp_lab` is the `ddp-lab` command."""

from ddp_lab.cli import main

main()
