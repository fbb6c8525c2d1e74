"""One step as a profiler sees it: what the host spends its time on, and what each stream of the device runs."""

import cProfile
import io
import pstats
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

#: Steps under the profiler of Python's functions; rows of each table.
STEPS, ROWS = 3, 40
COLOURS = {"compute": "#4c78a8", "gather": "#f58518", "reduce": "#e45756", "copy": "#9d9da1"}


class Span(NamedTuple):
    """What a stream runs, in milliseconds from the first; ``copy`` is what is no collective on a stream of those."""

    stream: int
    kind: str
    start: float
    end: float


def trace(run: Callable[[], torch.Tensor], finish: Callable[[], object]) -> dict[str, Any]:
    """Profile steps of ``run`` (forward to a loss), backward and ``finish``: ``text`` of the host, and ``spans``."""
    forward, backward = cProfile.Profile(), cProfile.Profile()
    for _ in range(STEPS):
        with forward:
            loss = run()
        _in_autograd(backward.enable, loss.device)
        loss.backward()
        _in_autograd(backward.disable, loss.device)
        finish()
    text = [_of_functions(name, one) for name, one in (("forward", forward), ("backward", backward))]
    for _ in range(2):  # the first starts the device's tracing
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run().backward()
            finish()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    averages = sorted(profiler.key_averages(), key=lambda one: -one.self_cpu_time_total)[:ROWS]
    text.append("one step by operators and calls of the driver, microseconds of the host and calls")
    text += [f"{one.self_cpu_time_total:10.0f} {one.count:6} {one.key}" for one in averages]
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    return {"text": "\n".join(text) + "\n", "spans": spans(profiler.profiler.kineto_results.events())}


def _in_autograd(action: Callable[[], object], device: torch.device) -> None:
    """Call ``action`` in the thread that runs backward, which is another one for a GPU: a profiler sees one thread."""
    tensor = torch.ones((), device=device, requires_grad=True)
    tensor.register_hook(lambda _: action() and None)
    tensor.backward()


def _of_functions(name: str, profiled: cProfile.Profile) -> str:
    text = io.StringIO()
    pstats.Stats(profiled, stream=text).strip_dirs().sort_stats("tottime").print_stats(ROWS)
    return f"{name} of {STEPS} steps by functions\n{text.getvalue().strip()}\n"


def spans(events: Iterable[Any]) -> list[Span]:
    """The kernels and copies among a profiler's ``events``."""
    found = [
        (one.device_resource_id(), one.name(), one.start_ns(), one.start_ns() + one.duration_ns())
        for one in events
        if one.device_type() == torch.autograd.DeviceType.CUDA and not one.is_user_annotation() and one.duration_ns()
    ]
    first = min((start for _, _, start, _ in found), default=0)
    communicating = {stream for stream, name, _, _ in found if name.startswith("nccl")}

    def kind(stream: int, name: str) -> str:
        if name.startswith("nccl"):
            return "gather" if "AllGather" in name else "reduce"
        return "copy" if stream in communicating else "compute"

    rows = [Span(stream, kind(stream, name), (a - first) / 1e6, (b - first) / 1e6) for stream, name, a, b in found]
    return sorted(rows, key=lambda span: span.start)


def exposed(found: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Milliseconds: of the step, with compute, with collectives, and of these the ones without compute."""
    rows = [Span(*one) for one in found]
    computing = _joined(span for span in rows if span.kind == "compute")
    moving = _joined(span for span in rows if span.kind in ("gather", "reduce"))
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in computing for c, d in moving)
    total = {"step": max((span.end for span in rows), default=0.0), "compute": _length(computing)}
    return total | {"collectives": _length(moving), "exposed": _length(moving) - hidden}


def _joined(rows: Iterable[Span], gap: float = 0.0) -> list[tuple[float, float]]:
    """The times in which any of ``rows``, sorted, runs; what is no farther apart than ``gap`` is one."""
    found: list[tuple[float, float]] = []
    for row in rows:
        if found and row.start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], row.end))
        else:
            found.append((row.start, row.end))
    return found


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def picture(title: str, steps: dict[str, Sequence[Sequence[Any]]]) -> str:
    """SVG of one step of each implementation on one scale of time: a lane for each stream, the compute's first."""
    ends = [span[3] for found in steps.values() for span in found]
    scale, lines, y = 1100 / max(ends, default=1.0), [f'<text x="10" y="20">{escape(title)}</text>'], 40
    for name, found in steps.items():
        figures = ", ".join(f"{key} {value:.1f} ms" for key, value in exposed(found).items())
        lines.append(f'<text x="10" y="{y + 12}">{escape(name)}: {figures}</text>')
        rows = [Span(*one) for one in found]
        for stream in sorted({row.stream for row in rows}, key=lambda one: -sum(row.stream == one for row in rows)):
            y += 20
            for kind, colour in COLOURS.items():
                own = (row for row in rows if row.stream == stream and row.kind == kind)
                for start, end in _joined(own, gap=0.3 / scale):
                    at = f'x="{10 + scale * start:.1f}" y="{y}" width="{max(scale * (end - start), 0.2):.1f}"'
                    lines.append(f'<rect {at} height="16" fill="{colour}"/>')
        y += 40
    for place, (kind, colour) in enumerate(COLOURS.items()):
        lines.append(f'<text x="{10 + 90 * place}" y="{y}" fill="{colour}">{kind}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1120" height="{y + 10}" font-family="sans-serif" '
    return "\n".join([head + 'font-size="13">', '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>\n"])
