"""`python -m neso.cli`: the `neso` command without its console script."""

from neso.cli.main import main

main()
