"""The modules that every rank needs, imported once, in the forkserver, so that starting a rank costs a fork.

Initialises no device. Nothing but the forkserver, and a rank with an interpreter of its own, imports this module,
because the objects of the process that does are no longer seen by its garbage collector.
"""

from __future__ import annotations

import gc

# torch._dynamo: the first optimizer step would otherwise import it, which takes half a second in every rank.
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

# The implementations that every installation has, and the baselines: each fresh rank would import their 45 modules.
import shardproof.harness.adapters.reference
import shardproof.harness.adapters.reference_flat
import shardproof.harness.adapters.replicas
import shardproof.harness.worlds.loop  # noqa: F401

# A collection writes to each of the 300,000 objects that the imports made. In a rank, which shares their memory with
# the forkserver until then, that copies 70 MB and takes a quarter of a second.
gc.collect()
gc.freeze()
