"""How everything here is measured: in turns, each contestant in processes of its own, and every run is kept.

    contestants.py  its ranks, stopped until its turn        worker.py   what such a rank does
    turns.py        who goes when                            race.py     the rounds
    figures.py      medians, intervals and limits            regime.py   a cable's rate, from communication : compute
    stamp.py        what a figure depends on besides         results.py  the files, which only grow
    suite.py        the command line of every suite          help.py     how its help is laid out
    migrate.py      files from before the harness

Nothing here knows what is measured. A suite (benchmarks/*.py) is a list of cases; a case measures itself.
"""
