"""The modules that every rank needs, imported once, in the forkserver, so that starting a rank costs a fork.

Initialises no device. Nothing but the forkserver, and a rank with an interpreter of its own, imports this module,
because the objects of the process that does are no longer seen by its garbage collector.
"""

import contextlib
import gc
import importlib

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

# The implementations that every installation has, and the baselines: each fresh rank would import their 45 modules.
import shardproof.harness.adapters.replicas
import shardproof.harness.worlds.loop  # noqa: F401
from shardproof.harness.tensors import private

# The first optimizer step would otherwise import it, which takes half a second in every rank.
private.find("torch._dynamo")
with contextlib.suppress(Exception):  # one that does not import has no rank, and its cases say why
    importlib.import_module("shardproof.harness.adapters.reference")

# A collection writes to each of the 300,000 objects that the imports made. In a rank, which shares their memory with
# the forkserver until then, that copies 70 MB and takes a quarter of a second.
gc.collect()
gc.freeze()
