"""``python -m firn_node``: the same as ``firn``."""

from firn.cli.main import main

main()
