"""`towpath bench`: what Towpath takes beside what people would use instead, measured alike for everybody.

    harness/      how everything is measured: in turns, each contestant in processes of its own, every run kept
    suites/       what is measured: one file for each suite of `towpath bench`, and what such a file needs
    workload.py   what contestants train    gpt.py   the model    steps.py   one optimizer step as a turn
    peers.py      PyTorch's own, plain and tuned           ring_reduce_scatter.py   our ring for FSDP2
    field.py      who takes part, and who is lossless      selection.py   who is raced after the screening
    venue.py      the shaped cluster of this machine, or the job that this process is a rank of
    table.py      results in a terminal                    page.py, drawing.py      results as one HTML page

May import: train, and all that train may.
"""
