"""Where do ranks live? Worlds of rank processes: started once, reused by many cases, replaced when a case breaks one.

Imports ``parity``, ``collectives``, ``adapters``, ``findings`` and ``tensors``. The modules of the controller import no
torch.

- in the controller: ``pool`` (``Pool``), ``world`` (``World``, the processes of one world), ``lease`` (locks on devices
  and cores that pytest processes share), ``waiting`` (waits that are bounded and say for whom), ``watchdog`` (diagnosis
  of a hang), ``forkserver`` (starts the ranks), ``scratch`` (temporary directories).
- in the forkserver: ``preloaded`` (what it imports before it forks ranks).
- in a rank: ``entry`` (the process's first function), ``loop`` (start-up and the job loop), ``casefile`` (imports the
  case's module), ``leftovers`` (checks that a case left no state behind).
- between them: ``jobs`` (the messages).
"""
