"""The protocol of adapters, and the options with which a case configures an implementation."""

from shardproof.harness.adapters.base import Accumulation as Accumulation
from shardproof.harness.adapters.base import Adapter as Adapter
from shardproof.harness.adapters.base import Clip as Clip
from shardproof.harness.adapters.base import OptimizerFactory as OptimizerFactory
from shardproof.harness.adapters.base import Precision as Precision
from shardproof.harness.adapters.base import Settings as Settings
from shardproof.harness.adapters.base import StateForm as StateForm
from shardproof.harness.adapters.base import Trainee as Trainee
from shardproof.harness.adapters.base import Traits as Traits
from shardproof.harness.adapters.base import WholeParameters as WholeParameters
from shardproof.harness.adapters.base import WrapPolicy as WrapPolicy
from shardproof.harness.adapters.base import padded_to_rows as padded_to_rows
from shardproof.harness.adapters.config import NamedDimensions as NamedDimensions
from shardproof.harness.adapters.registry import built_in_with as built_in_with
