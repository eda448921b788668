"""What ran: one record of every transfer, from which statistics, metrics and traces are derived.

The engine reports to `record`, and `trace` keeps the intervals of single steps. `stats` is what users read, so it is
above the engine. `sent_bytes` sums what a schedule sends, and needs no torch.
"""
