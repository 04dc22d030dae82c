"""`python -m cluster.cli` is the `diptych` command."""

from cluster.cli import main

main(prog_name="diptych")
