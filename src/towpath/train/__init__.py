"""`towpath train`, in the order in which a run uses it.

    config.py           the TOML file: all sections, their keys and checks
    data.py             `towpath data prepare` writes tokens, and a run reads them
    models.py           what is trained: our own GPT, or a model of transformers
    parallel.py         how ranks share it: sharding, stages, `auto`; tensor_parallel.py: the layers of a node's ranks
    trainer.py          the run from top to bottom, with its optimizers and its learning rate
    job.py              the ranks: what they agree on, and signals
    checkpoints.py      where a run resumes, and when it saves
    metrics.py          what it reports

It may import everything except the command.
"""
