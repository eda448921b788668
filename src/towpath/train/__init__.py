"""The reference trainer behind `towpath train`: from a configuration to a trained model.

    trainer.py          the run, from top to bottom: setup, loop, step, evaluation
    config.py           the TOML file, with its checks
    parallel.py         sharding, tensor-parallel layers, pipeline stages, and the planner's choice of them
    optimizers.py       optimizers, learning rate, loss scale
    checkpoints.py      saving and resuming
    metrics_logger.py   rows of metrics (metrics.py), the live line (progress.py), traces (trace.py), the summary
    job.py, signals.py  the ranks, and how they stop
    launch.py           `--ranks N`
    data/, models/      what is trained, on what

It may import everything except the command.
"""
