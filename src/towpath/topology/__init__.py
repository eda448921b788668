"""The shape of the cluster (`cluster`, without torch), its process groups, and how a rank joins them.

    cluster.py  Topology, Extent          groups.py  process groups, and the launcher's environment
    store.py    rendezvous, StatusStore   init.py    `towpath.init()`, and checks of devices
    together.py what fails on one rank, or differs between ranks, raises on all of them

May import: errors.
"""
