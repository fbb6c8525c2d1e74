"""Functions of torch that are observed are torch's own again when nobody observes them."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from shardproof.harness.training.doctor import doctor
from shardproof.harness.watching import calls


def test_whoever_leaves_first() -> None:
    """Two models that are watched at once may end in the order in which they began, or in the other."""
    before, counts = torch.nn.utils.clip_grad._get_total_norm, {"first": 0, "second": 0}

    class Counts:
        def __init__(self, name):
            self.name = name

        def on_norm(self, *call):
            counts[self.name] += 1

    def observed(name):
        return calls.observed(Counts(name))

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    for order in (("first", "second"), ("second", "first")):
        contexts = {name: observed(name) for name in ("first", "second")}
        for name in ("first", "second"):
            contexts[name].__enter__()
        contexts[order[0]].__exit__(None, None, None)
        torch.nn.utils.get_total_norm([parameter.grad])
        contexts[order[1]].__exit__(None, None, None)
        torch.nn.utils.get_total_norm([parameter.grad])
    assert torch.nn.utils.clip_grad._get_total_norm is before, "the function is still replaced"
    assert counts == {"first": 1, "second": 1}, "the one that is left observes, and nobody afterwards"


def test_methods_that_are_not_of_python_are_put_back_as_they_were() -> None:
    """Else they take no group when they are called, and the training ends at its first collective after the doctor."""
    with calls.observed(None):  # type: ignore[arg-type]
        pass
    method = vars(dist.ProcessGroup)["allreduce"]
    assert hasattr(method, "__get__"), "it is not bound to the group that it is called on"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as they began", "inside out"])
def test_two_doctors_leave_join_as_it_was_and_keep_no_model(order) -> None:
    """A replaced function that stays keeps the doctor that replaced it, and through it a model that is never freed."""
    before = Join.__enter__, Join.__exit__
    watching, models = [], []
    for _ in order:
        model = torch.nn.Linear(2, 2)
        models.append(weakref.ref(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watching.append(doctor(model, optimizer, on_finding="collect").__enter__())
    del model, optimizer
    for number in order:
        watching[number].close()
    watching.clear()
    gc.collect()
    assert before == (Join.__enter__, Join.__exit__), "join() is still replaced"
    assert [one() for one in models] == [None, None], "a model is kept"
