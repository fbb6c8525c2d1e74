"""Which collectives did each rank issue? The trace, the announcements on the shared board, and delays.

Imports ``adapters``, ``judging`` and ``tensors``. ``board`` imports no torch: the controller reads it.

- ``trace``: ``Collective``, ``Trace`` and the comparison of traces.
- ``units``: matches collectives to units by their size in bytes.
- ``differences``: marks what is missing and extra in a trace.
- ``recorder``: ``Recorder``, the dispatch mode that fills a trace.
- ``board``, ``announce``: the collectives that each rank is about to enter, in memory that the controller and all ranks
  share.
- ``delays``: ``Delay``, and ``Perturbation``, which injects the delays of a run.
"""
