"""Benchmarks of Towpath: suites of cases, and the harness that measures them (README.md).

harness/      running candidates, the rounds of a comparison, figures, files of results, the suite's command line
suites/       what is measured
workload.py, gpt.py            the model and its data
peers.py, deepspeed_peer.py    the candidates by name, and one optimizer step as a sample
selection.py                   which candidates take part
environment.py                 a workload, links between nodes, and the search for a comm ratio
report.py                      results as text and tables
"""
