"""Adapters of a reference of which one place is edited: waits between streams, lifetimes of buffers, overlap.

Most do nothing on the CPU, where there are no streams; their tests need GPUs.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

COMM = "common.comm_context:CommContext"
GATHERS = "per_parameter.group:ParamGroup"
REDUCES = "per_parameter.reduction:Reducer"
FLAT_REDUCES = "flat.reduction:Reducer"

PER_PARAMETER = {
    # Waits.
    "gathers-before-the-step": Edit(
        "per_parameter.unit:Unit._root_pre_forward",
        "streams.join(self.comm.gather_stream, streams.current(self.device))",
        "pass",
    ),
    "waits-for-all-behind-the-event": Edit(
        "per_parameter.unit:Unit._root_pre_forward",
        "streams.wait(self.comm.gather_stream, event)",
        "streams.join(self.comm.gather_stream, streams.current(self.device))",
    ),
    "event-not-waited-for": Edit(
        "per_parameter.unit:Unit._root_pre_forward", "streams.wait(self.comm.gather_stream, event)", "pass"
    ),
    "computes-before-the-gather": Edit(f"{GATHERS}.wait_for_unshard", "streams.wait(current, pending.event)", "pass"),
    "gathers-before-the-copy-out": Edit(
        f"{GATHERS}.wait_for_unshard", "streams.wait(self.comm.gather_stream, copied_out)", "pass"
    ),
    "reduces-before-backward": Edit(
        f"{REDUCES}.reduce", "streams.join(comm.reduce_stream, streams.current(group.device))", "pass"
    ),
    "all-reduces-before-the-reduce-scatter": Edit(
        f"{REDUCES}._finish", "streams.join(stream, comm.reduce_stream)", "pass"
    ),
    "reduce-input-freed-early": Edit(
        f"{COMM}.release_reduce_inputs",
        "streams.wait(streams.current(self.device), self._reduce_inputs.popleft().event)",
        "self._reduce_inputs.popleft()",
    ),
    "reduce-input-not-kept": Edit(
        f"{COMM}.keep_reduce_input", "self._reduce_inputs.append(InFlight(contributions, reduced))", "pass"
    ),
    "steps-before-the-reductions": Edit(
        f"{COMM}.finish_reductions", "streams.wait(streams.current(self.device), event)", "pass"
    ),
    "host-reads-before-the-copy": Edit(f"{COMM}.finish_reductions", "event.synchronize()", "pass"),
    "default-stream-for-the-current-one": Edit("common.streams:current", "current_stream", "default_stream"),
    # Offloading.
    "gradients-stay-on-the-device": Edit(
        "per_parameter.reduction:Accumulator._to_home", "if not self._offloads or", "if True or"
    ),
    "gradients-not-pinned": Edit(
        "per_parameter.reduction:Accumulator._to_home", "pin_memory=self._pins)", "pin_memory=False)"
    ),
    "units-kept-whole": Edit(
        "per_parameter.shards:Shards._cut_into_buffer",
        "view.copy_(",
        "vars(self).setdefault('kept_', []).append(cut.data); view.copy_(",
    ),
    # Overlap.
    "gathers-on-the-current-stream": Edit(f"{GATHERS}.unshard", "self.comm.gather_stream if implicit else", ""),
    "reductions-on-the-current-stream": Edit(
        f"{COMM}.create_streams",
        "self.reduce_stream = streams.create(self.device, priority=streams.HIGH_PRIORITY)",
        "self.reduce_stream = streams.current(self.device)",
    ),
    "gathers-wait-for-computation": Edit(f"{GATHERS}.unshard", "if self.refresh():", "if self.refresh() or True:"),
    "computation-waits-for-reductions": Edit(
        f"{COMM}.keep_reduce_input",
        "self._reduce_inputs.append(InFlight(contributions, reduced))",
        "self._reduce_inputs.append(InFlight(contributions, reduced)); self.release_reduce_inputs(keep=0)",
    ),
    "host-waits-for-reductions": Edit(
        f"{COMM}.finish_reductions", "if self._host_waits and event is not None:", "if event is not None:"
    ),
    "host-waits-for-gathers": Edit(
        f"{GATHERS}.wait_for_unshard",
        "streams.wait(current, pending.event)",
        "None if pending.event is None else pending.event.synchronize()",
    ),
    # Memory.
    "all-reduce-inputs-kept": Edit(
        f"{COMM}.release_reduce_inputs",
        "self.max_reduce_inputs - 1 if keep is None else keep",
        "99 if keep is None else keep",
    ),
    "gradients-kept-until-the-end": Edit(f"{REDUCES}._copy_in", "grads.clear()", "self.kept_ = list(grads)"),
}

FLAT = {
    "flat-gathers-before-the-step": Edit(
        "flat.unit:FlatUnit._root_pre_forward",
        "streams.join(self.context.gather_stream, streams.current(self.device))",
        "pass",
    ),
    "flat-computes-before-the-gather": Edit(
        "flat.group:FlatGroup.wait_for_unshard",
        "streams.wait(streams.current(self.device), self._pending.event)",
        "pass",
    ),
    "flat-buffer-freed-early": Edit(
        "flat.group:FlatContext._release_oldest", "streams.wait(self.gather_stream, used)", "pass"
    ),
    "flat-buffer-dropped-at-once": Edit("flat.group:FlatBuffer.free", "if used is None:", "if True:"),
    "flat-reduces-before-backward": Edit(
        f"{FLAT_REDUCES}.reduce", "streams.join(context.reduce_stream, streams.current(group.device))", "pass"
    ),
    "flat-all-reduces-before-the-reduce-scatter": Edit(
        f"{FLAT_REDUCES}._finish", "streams.join(stream, context.reduce_stream)", "pass"
    ),
    "flat-reduce-input-not-kept": Edit(
        f"{FLAT_REDUCES}.reduce",
        "context.keep_reduce_input(contributions, done if shard is contributions else reduced)",
        "pass",
    ),
    "flat-host-reads-before-the-copy": Edit(f"{FLAT_REDUCES}._finish", "host_waits=is_copying)", "host_waits=False)"),
    "flat-default-stream-for-the-current-one": Edit("common.streams:current", "current_stream", "default_stream"),
    "flat-gradients-not-pinned": Edit("flat.reduction:Reducer._accumulate", "pin_memory=True", "pin_memory=False"),
    "flat-keeps-three-buffers": Edit(
        "flat.group:FlatContext.release_retired", "len(self._retired) > keep", "len(self._retired) > keep + 2"
    ),
    "flat-retired-while-gathering-ahead": Edit(
        "flat.group:FlatContext.release_retired", "_MAX_RETIRED_AHEAD if ahead else _MAX_RETIRED", "_MAX_RETIRED"
    ),
    "flat-gathers-behind-what-computes": Edit(
        "flat.group:FlatContext.release_retired", "_MAX_RETIRED_AHEAD if ahead else _MAX_RETIRED", "0"
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
