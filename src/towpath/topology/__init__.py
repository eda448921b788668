"""The shape of the cluster, its process groups, and how a rank joins them.

    cluster.py    Topology, Extent, without torch   groups.py  process groups
    launcher.py   the launcher's environment        init.py    `towpath.init()`, and checks of devices
    store.py      rendezvous, StatusStore
    together.py   what fails on one rank, or differs between ranks, raises on all of them

May import: errors.
"""
