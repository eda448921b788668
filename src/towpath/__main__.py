"""`python -m towpath …` is `towpath …`: for launchers that take modules, as torchrun does."""

from towpath.cli.main import main

if __name__ == "__main__":
    main()
