"""`python -m towpath …` is `towpath …`: for launchers that take modules, as torchrun does."""

if __name__ == "__main__":
    from towpath.protect.warm import run_warm

    run_warm()  # does not return if this command runs in a fork of a process that has torch loaded

    from towpath.cli.main import main

    main()
