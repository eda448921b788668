"""Record when each transfer and each computation of some steps runs, and write it as a file for Perfetto.

    from towpath import tracing

    with tracing.trace(model) as trace:  # on every rank, around the same steps
        train_one_step()
    tracing.write_trace(Path("trace.json"), model, trace)  # on every rank; rank 0 writes

The file has Chrome's trace format, which https://ui.perfetto.dev opens. A process of the file is a rank, and its
threads are tracks. Intervals of one thread must not overlap. So a track on which some overlap gets further rows:
"between nodes", "between nodes (2)", and so on.

Every rank counts seconds from the end of a barrier (`trace`). Ranks leave a barrier at slightly different
times, as long apart as its last messages take on the network. The times of different ranks are comparable up to that.
"""

from towpath.observe.record import Trace
from towpath.observe.stats import trace, write_trace

__all__ = ["Trace", "trace", "write_trace"]
