"""How does pytest drive the harness? Options, collection, marks, records, verdicts and known failures.

Imports ``worlds``, ``adapters``, ``collectives`` and ``verdicts``, and ``parity`` and ``models`` for what it draws. A
project's conftest names the plugin as ``shardproof.plugin``; case modules import from ``marks`` and ``axes`` by
``shardproof.testing``. Nothing else is imported from outside.

- ``hooks``: the hook functions.
- ``state``: the objects that the hooks of one pytest process share.
- ``options``: the command line; ``selection``: the checked values of its options.
- ``marks``: the marks of cases; ``axes``: parameter sets that several chapters share.
- ``collection``: makes one pytest item for each implementation and world; ``cases``: runs one item.
- ``drawing``: searches for an example of a drawn parameter that fails, and shrinks it; ``strategies`` draws examples
  with hypothesis.
- ``effort``: what a shorter run leaves out. ``pairwise`` and ``quick`` choose what it keeps, and ``always`` reads what
  it keeps in any case.
- ``records``: the record of one case; ``journal``: the run file, with the ``environment`` of the run and the
  ``origin`` of the code.
- ``launched``: runs that torchrun started; ``ahead``: several cases at once in these; ``resuming``: what restarted ones
  keep.
- ``reproduction``: the command that repeats one case.
- ``bounds``: how large a record may be.
- ``progress``: which cases were selected and which have a record; ``exit_codes``: what a run as a whole exits with.
- ``signals``: SIGTERM and SIGHUP end a run as Ctrl-C does.
- ``terminal``: what the end of a run prints: failures that are alike once.
- ``notices``: shows lines while a case runs.
- ``suite_modules``: imports the modules of shardproof's own suites under one name.
- ``known_failures``: strict expected failures; ``run_known_failures``: those of a whole run;
  ``expected_texts``: inline expected texts.
"""
