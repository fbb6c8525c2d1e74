"""Where do ranks live? Worlds of rank processes: started once, reused by many cases, replaced when a case breaks one.

Imports ``parity``, ``collectives``, ``adapters``, ``judging`` and ``tensors``. The modules of the controller import no
torch (``tests/test_help.py`` runs pytest with a torch that cannot be imported).

- in the controller: ``pool`` (``Pool``), ``world`` (``World``, the ranks of one world), ``rank_process`` (the handle of
  one rank), ``lease`` (locks on devices and cores that pytest processes share), ``waiting`` (waits that are bounded and
  say for whom), ``watchdog`` (diagnosis of a hang), ``flight_recorder`` (torch's own, for NCCL),
  ``forkserver`` (starts the ranks; a rank's first function, and its new interpreter), ``scratch`` (temporary
  directories).
- in a torchrun job: the folder ``torchrun``.
- in the forkserver: ``preloaded`` (what it imports before it forks ranks).
- in a rank: ``loop`` (start-up and the job loop), ``gloo`` (groups with one worker thread), ``leftovers`` (checks that
  a case left no state behind).
- between them: ``jobs`` (the messages).
"""
