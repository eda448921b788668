"""From a configuration to a trained model: models, data, the loop, and what one watches meanwhile.

    config.py      what is told      run.py → loop.py   what every rank does: a run, and one step after the other
    job.py         the ranks         launch.py   starts them   stopping.py   ends them   saves.py   their checkpoints
    models.py      the model: gpt.py, hugging_face.py, and weights.py, which reads their files
    data.py        windows of tokens: shards.py, shuffle.py; made by prepare.py of tokens.py and
                   corpus.py, json_lines.py, dataset.py
    watch.py       what is seen: metrics.py, progress.py, summary.py, perfetto.py; flops.py, memory.py, bar.py
    demo.py        several strategies side by side: plots.py, report.py

May import everything below the command: the API, checkpoints, and for the demo the lab.
"""
