"""What torch's allocator hands out in a step, by its profiler."""

from torch.profiler import ProfilerActivity, profile


def allocated(step):
    """The most bytes that are held beyond those before a step, in each phase of it, and those that are left behind.

    Phases begin where ``record_function`` has their names; the first is forward.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    most, held, phase = {"forward": 0, "backward": 0, "step": 0}, 0, "forward"
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most[phase] = max(most[phase], held)
        elif event.name() in most:
            phase = event.name()
    return most, held
