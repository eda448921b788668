"""The comparison at each boundary, and the watchdog: no rank waits forever or drifts apart unnoticed."""
