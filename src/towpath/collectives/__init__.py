"""The collectives that execute the transfers of a schedule on this rank.

Each one runs on the backend's own collective, or follows the messages that `core/routes.py` lists for its route. May
import: core, topology, errors.
"""
