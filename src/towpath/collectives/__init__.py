"""The collectives a schedule is made of, each one executing the plan that `core/routes.py` lays out.

May import: core, topology, errors.
"""
