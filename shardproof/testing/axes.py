"""Values of parameters that several chapters share, such as ``RESHARD``, and delays."""

from shardproof.harness.collectives.delays import Delay as Delay
from shardproof.harness.plugin.axes import DELAY_MS as DELAY_MS
from shardproof.harness.plugin.axes import DELAYED as DELAYED
from shardproof.harness.plugin.axes import DELAYED_BEFORE as DELAYED_BEFORE
from shardproof.harness.plugin.axes import DELAYS as DELAYS
from shardproof.harness.plugin.axes import FLAT as FLAT
from shardproof.harness.plugin.axes import KEEPS as KEEPS
from shardproof.harness.plugin.axes import RESHARD as RESHARD
from shardproof.harness.plugin.axes import RESHARD_CHOICES as RESHARD_CHOICES
from shardproof.harness.plugin.axes import RESHARD_EXPLICIT as RESHARD_EXPLICIT
from shardproof.harness.plugin.axes import RESHARD_FREES as RESHARD_FREES
from shardproof.harness.plugin.axes import RESHARD_ROOT as RESHARD_ROOT
from shardproof.harness.plugin.axes import RESHARD_TO_PARTS as RESHARD_TO_PARTS
from shardproof.harness.plugin.axes import RESHARD_UNEVEN as RESHARD_UNEVEN
from shardproof.harness.plugin.axes import SHARDS as SHARDS
from shardproof.harness.plugin.axes import WHOLE as WHOLE
from shardproof.harness.plugin.axes import with_first as with_first
