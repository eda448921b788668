"""The record of what ran: one table of the transfers, for statistics and metrics, and traces of single steps.

The engine reports to `record`. `totals` has the table's rows and their sums, and `trace` the intervals of a trace and
their file. Neither needs torch. `stats` is what users read, so it is above the engine.
"""
