"""`python -m neso.cli`: the `neso` command where the script is not on the path."""

from neso.cli.main import main

main()
