"""What runs beside the computation: one queue of transfers per kind, its stream, and the record of what ran when."""
