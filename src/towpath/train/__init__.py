"""`towpath train`, in the order in which a run uses it.

    config.py           the TOML file: all sections, their keys and checks
    prepare.py, data.py `towpath data prepare` writes tokens, and a run reads them
    models/             what is trained
    parallel.py         how ranks share it: sharding, stages, tensor parallelism, `auto`
    optimizers.py       AdamW and Muon, and the learning rate
    trainer.py          the run from top to bottom
    job.py              the ranks: what they agree on, and signals
    checkpoints.py      where a run resumes, and when it saves
    metrics.py          what it reports

It may import everything except the command.
"""
