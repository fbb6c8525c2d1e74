"""What torch.fsdp does wrong on a CPU and its adapter avoids: an adapter that does not avoid it fails cases.

The capabilities that the adapter lacks for these reasons would only skip the cases.
"""

import json

import pytest

from tests.harness.inner import PYTHONPATH, QUIET, ROOT

pytestmark = pytest.mark.sampled

OFFLOADS = """
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.torch_fsdp import TorchFsdpAdapter


class Offloads(TorchFsdpAdapter):
    @classmethod
    def capabilities(cls):
        return super().capabilities() | {Capability.FULL_PARAMS_ON_CPU, Capability.PAGEABLE_OFFLOAD}

    def _models_are(self, form):
        return self._state_dicts_are(form)

    def _state_dicts_are(self, form):
        if form == "sharded":
            return super()._state_dicts_are(form)
        api = self.api
        options = {"offload_to_cpu": True, "rank0_only": form == "first-rank"}
        configs = api.FullStateDictConfig(**options), api.FullOptimStateDictConfig(**options)
        return api.FullyShardedDataParallel.state_dict_type(self.module, api.StateDictType.FULL_STATE_DICT, *configs)
"""

#: What frees the memory that it reads raises, or the process ends with a segmentation fault.
FREED = {"crash": "killed by SIGSEGV", "fail": "out of bounds for storage of size 0"}
PINNED = {"fail": "Cannot access accelerator device"}

CASES = {
    "F-41, a state dict on every rank": ("test_state.py::test_names_and_values[%s-w2-plain-full]", FREED),
    "F-41, a state dict on the first rank": ("test_state.py::test_names_and_values[%s-w2-plain-first-rank]", FREED),
    "F-41, parameters": ("test_evaluation.py::test_full_parameters[%s-w2-None-read-on-cpu-flat]", FREED),
    "F-10": ("test_offload.py::test_offloaded[%s-w2-undelayed-pageable]", PINNED),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_adapter_avoids_is_found(pytester, monkeypatch, case):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    pytester.makepyfile(adapters=OFFLOADS)
    node, says = CASES[case]
    options = ("--impl", "adapters:Offloads", "--device", "cpu", "--report", "run.json")
    pytester.runpytest_subprocess(*QUIET, *options, f"{ROOT}/suites/{node % 'adapters:Offloads'}", timeout=120)
    (record,) = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
    assert record["verdict"] in says, record
    assert says[record["verdict"]] in record["failure"]["text"]
