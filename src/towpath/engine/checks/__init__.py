"""Checks that keep ranks from waiting forever or diverging: stalled peers, different programs, coupled optimizers."""
