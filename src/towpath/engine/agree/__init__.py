"""What keeps ranks from waiting forever or drifting apart: the comparison at each boundary, and the watchdog."""
