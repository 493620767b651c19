"""`python -m hmoe_repro` is the command `hmoe`."""

from .cli.app import main

if __name__ == "__main__":
    main()
