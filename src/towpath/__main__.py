"""`python -m towpath …` is `towpath …`: for launchers that take modules, as torchrun and `towpath lab run` do."""

from towpath.cli.main import main

if __name__ == "__main__":
    main()
