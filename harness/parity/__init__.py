"""What is compared with what? The implementation with its baseline and with a float64 oracle: the engine.

Imports ``simulation``, ``adapters``, ``collectives``, ``models``, ``judging`` and ``tensors``. Cases call
it by ``shardproof.testing``.

- ``rank``: ``Rank``, the context object that a case receives. It builds on ``rank_state``.
- ``run``: ``Run`` drives an adapter through training steps and copies what each shows; ``sharded_run`` also checks that
  its model is sharded.
- ``pair``: ``Pair`` trains the sharded run, the baseline and the oracle; ``comparison`` compares one step of them.
- ``coverage``: checks by positions and by sizes that the shards of all ranks make up the model.
- ``protocol``: checks in a rank that an adapter keeps to the protocol, and which tied parameters sharding has untied.
- ``oracle``: the float64 replay.
- ``replay``: the oracle's and the baseline's steps, which cases with equal inputs share.
- ``explainer``, ``divergences``: the first tensor that diverges of what modules compute (``watching.capture``).
- ``exchange``: how ranks exchange values outside of process groups.
"""
