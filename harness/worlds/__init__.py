"""Where do ranks live? Worlds of rank processes: started once, reused by many cases, replaced when a case breaks one.

Imports ``parity``, ``collectives``, ``adapters``, ``verdicts`` and ``tensors``. The modules of the controller import no
torch.

- in the controller: ``pool`` (``Pool``), ``world`` (``World``, the ranks of one world), ``rank_process`` (the handle of
  one rank), ``lease`` (locks on devices and cores that pytest processes share), ``waiting`` (waits that are bounded and
  say for whom), ``watchdog`` (diagnosis of a hang), ``forkserver`` (starts the ranks), ``scratch`` (temporary
  directories).
- in a torchrun job: ``torchrun`` (this process's place in it), ``fleet`` (its processes, as the controller sees them),
  ``fleet_pool`` (its worlds), ``remote`` (handles of ranks elsewhere), ``supervisor`` (the other side of these),
  ``store`` and ``sockets`` (how the processes find each other and talk).
- in the forkserver: ``preloaded`` (what it imports before it forks ranks).
- in a rank: ``entry`` (the process's first function, and its new interpreter), ``loop`` (start-up and the job loop),
  ``gloo`` (groups with one worker thread), ``casefile`` (imports the case's module), ``leftovers`` (checks that a case
  left no state behind), ``meeting`` (how ranks of several hosts meet).
- between them: ``jobs`` (the messages).
"""
