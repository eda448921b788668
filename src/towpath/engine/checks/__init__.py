"""What keeps ranks from waiting forever or diverging: peers that stall, programs that differ, optimizers that mix."""
