"""A step's events as a trace and as a picture."""

from pipecomm.engine.timeline import LANES, TimelineEvent, draw_timeline, stack, write_trace

__all__ = ["LANES", "TimelineEvent", "draw_timeline", "stack", "write_trace"]
