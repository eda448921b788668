"""`towpath doctor`: finds what is wrong with a network and its machines before a training is started on them.

It needs no process group, so it works where training does not. Every wait has a limit: a port that no other machine
reaches is a finding, and never a hang.

    gathering     the processes find one another. The first of them leads, and the others carry out what it asks for
    examination   what the leader asks for, and in which order
    interfaces, machine, compute        facts about one machine or rank
    channels, services, paths           measurements between two machines, over plain sockets (`json_connection.py`)
    judge         from all facts to causes. A pure function, without any network
    gain          what a cause costs a training, from the planner

Facts are values of JSON from the start, because they are sent between machines, and `--json` prints them.
"""
