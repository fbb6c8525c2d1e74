"""Is my training right? Judges what ``watching`` sees of the user's own training loop.

Nothing here imports pytest: it runs inside the user's training process.

- ``doctor``: ``Doctor``, which watches the first steps of a loop on every rank and reports; ``examination``, which
  checks a step gets, and which findings wait for a later step; ``ranks``, what ranks tell each other of both;
  ``starts``, what a rank is for a root when watching begins; ``roots``, the further roots of a loop.
- ``looking``: the looks at all roots after their watched steps; ``later``, whether a look is as these were.
- ``exchange``: sends values of all ranks to each other, on a group of its own.
- ``evidence``: what all ranks have seen of one step, by parameter: who holds what, who reads what.
- ``reduction``: is each gradient reduced once, over all ranks whose data differ?
- ``invariants``: what holds in each right training: replicas are equal, data differ, the norm is that of all gradients;
  ``updates``, which optimizers have what trains, and whether they move it; ``freezing``, whether what is frozen stays;
  ``buffers``, whether ranks have the same; ``sharded``, whether full parameters were one's, and shards are no
  copies; ``recomputing``, whether recomputations repeat random numbers; ``tokens``, whether each counts alike;
  ``followers``, whether copies follow; ``modes``, norms and dropouts; ``sums``, sums of means; ``crossings``,
  collectives in autograd; ``boundary``, gradients between stages of a pipeline; ``acts``,
  whether loss scalers, schedulers and state dicts do what they are called for;
  ``rows``, whether ranks divide the rows of each epoch; ``division``, whether they do so twice; ``labels``,
  whether labels belong to the inputs, and ranks draw
  arguments of their own.
- ``request``: what a check is asked for; ``starting``: a check from Python.
- ``checking``: a check on the ranks of a world; ``trained_model``: the training in one process, of the run or the
  reference.
- ``reference``: the process of the reference. ``sides``, what the run, the baseline and the oracle have seen of a step;
  ``judge``, the first stage that diverges, and ``causes``, what it looks like; ``initial``, parameters before the first
  step; ``outcome``, what is said.
- ``resumption``: a training that is saved and one that resumes it, on ranks; ``checkpointing``, by which they are saved
  without functions of the user; ``user_calls``, which of these failed; ``restored``, what differs, by stages.
- ``bisect``: the search for the settings that it takes to fail, over ``trials``; ``axes``: what can be turned off.
- ``report``: the texts, and the run file.
- ``recording``: writes what one rank sees of some steps, and reads it.
- ``alignment``: one step of a recording, assembled from its ranks and cut into microbatches of the same rows.
- ``comparing``: where two recordings first diverge; ``pairs``, one step of both, and what is allowed; ``explaining``,
  what a divergence is; ``resuming``, which steps are those of a resumed training, and what its checkpoint lacks.
"""
