"""What one sees of a training run: metrics, the live line, traces, the summary, plots."""
