"""Pipeline schedules as data: built, checked, simulated, drawn, stored, and given out to execute.

Pure Python: neither torch nor the compiled extension is imported here.
"""

from __future__ import annotations

from pipecomm.schedule.action import Action, Direction, Kind
from pipecomm.schedule.builders import build, known_schedules
from pipecomm.schedule.evaluation import forward_rounds
from pipecomm.schedule.lowering import with_communication
from pipecomm.schedule.placement import Hop, Placement
from pipecomm.schedule.schedule import Schedule
from pipecomm.schedule.simulate import Costs, Simulation
from pipecomm.schedule.walk import Event

__all__ = [
    "Action",
    "Costs",
    "Direction",
    "Event",
    "Hop",
    "Kind",
    "Placement",
    "Schedule",
    "Simulation",
    "build",
    "forward_rounds",
    "known_schedules",
    "with_communication",
]
