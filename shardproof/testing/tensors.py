"""What tensors hold: shards, leaves of nested values, memory, and private names of torch."""

from shardproof.harness.casework.device_memory import bytes_of as bytes_of
from shardproof.harness.parity.coverage import state_numel as state_numel
from shardproof.harness.simulation.memory import Kind as Kind
from shardproof.harness.tensors import memory as memory
from shardproof.harness.tensors import private as private
from shardproof.harness.tensors.pieces import Piece as Piece
from shardproof.harness.tensors.pieces import each_once as each_once
from shardproof.harness.tensors.pieces import in_one_tensor_with as in_one_tensor_with
from shardproof.harness.tensors.pieces import original_name as original_name
from shardproof.harness.tensors.pieces import piece_of as piece_of
from shardproof.harness.tensors.pieces import uncut as uncut
from shardproof.harness.tensors.trees import full_of as full_of
from shardproof.harness.tensors.trees import local_of as local_of
from shardproof.harness.tensors.trees import map_leaves as map_leaves
from shardproof.harness.tensors.trees import map_tensors as map_tensors
from shardproof.harness.tensors.trees import tensors_of as tensors_of
