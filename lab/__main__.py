"""`python -m lab run …` and `python -m lab demo`, in a clone of the repository."""

from lab.command import app
from towpath.cli.main import main

if __name__ == "__main__":
    main(app, "python -m lab")
