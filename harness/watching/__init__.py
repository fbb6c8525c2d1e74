"""What does a trainer do? Looks at the steps of any training loop; needs no adapter, and no change of the loop.

Whatever is in this room is imported into the user's training process: it imports torch, and no pytest. It reads, and
never gathers, waits for a stream or changes what it sees.

- ``capture``: copies what the modules of a model compute, for ``--explain``.
- ``records``: what one rank has seen of one step, as plain values that can be sent and judged anywhere.
- ``observation``: ``Observation``, one tensor of a step on one rank; ``assembly``, full tensors of what ranks hold.
- ``names``: the names of parameters in the unsharded, unwrapped model; ``model``, the roots that have them.
- ``watch``: ``Watch``, which attaches to a model and to optimizers and sees steps; ``hooks``, which user code does not
  notice; ``tensors``, those of gradients; ``gathered``, parameters that a forward finds gathered after a step.
- ``step``: what is seen of one step, and its record; ``updates``, what its optimizers find and leave; ``pending``,
  gradients whose digests are read when it has ended; ``left``, those that are gone before an optimizer steps by them.
- ``looks``: ``Looks``, which counts steps after the watched ones, and reads states at some; ``standing``, what stands
  from step to step besides: modes, buffers, generators, frozen values; ``constants``, tensors of modules at the start.
- ``samples``: elements of narrow parameters before and after a step.
- ``roots``: all roots of a loop, and which optimizer is of which.
- ``watching``: ``Watcher``, the context that a doctor and a recording are.
- ``calls``: sees calls of torch's functions: norms, clipping, loss scalers, collectives, the end.
- ``groups``: the groups of ranks that a model tells of; ``ties``, the parameters that were registered twice, or
  that replaced frozen ones; ``sharding``, what they were before FSDP2 or FSDP1.
- ``acts``: calls of user code that concern the process: loss scalers, schedulers, groups of optimizers, state dicts;
  ``loads``, loads of states that load nothing, or that a step undoes.
- ``ledger``: the rows that loaders draw, and permutations, in the whole run; ``division``, how samplers divide data
  sets among ranks; ``streamed``, rows of loaders without
  numbers; ``tables``, numbers of names that data sets and the script have; ``labels``, those of a cross-entropy and
  the inputs of its forward.
- ``recomputing``: the random numbers of forwards, and running statistics, and of what backward recomputes of them.
- ``optimizers``: what optimizers have of the model's parameters.
- ``followers``: the search for copies of a root; ``following``, whether and when they are written; ``modes``, norms and
  dropouts in training mode; ``crossings``, collectives in autograd; ``boundary``, what stages of a pipeline send to
  each other; ``scales``, by what a loss is a mean.
- ``script``: runs a training script that knows of nothing.
"""
