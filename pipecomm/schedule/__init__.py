"""Pipeline schedules as data: built, checked, simulated, drawn, stored, and handed out to execute.

Torch is not imported here. Lists are NumPy arrays underneath; what must be fast over them (checks,
lowering, the walk against a clock) is the compiled core's.
"""

from __future__ import annotations

from pipecomm.schedule.action import Action, Direction, Kind
from pipecomm.schedule.builders import build, known_schedules
from pipecomm.schedule.compare import Candidate, best, candidates
from pipecomm.schedule.costs import Costs, read_costs
from pipecomm.schedule.data import Weights
from pipecomm.schedule.evaluation import forward_rounds
from pipecomm.schedule.lowering import with_communication
from pipecomm.schedule.picture import save_picture
from pipecomm.schedule.placement import Hop, Placement
from pipecomm.schedule.ranks import Ranks, Row
from pipecomm.schedule.schedule import Schedule
from pipecomm.schedule.simulate import Simulation
from pipecomm.schedule.versions import VersionUse, version_use, weight_versions
from pipecomm.schedule.walk import Event

__all__ = [
    "Action",
    "Candidate",
    "Costs",
    "Direction",
    "Event",
    "Hop",
    "Kind",
    "Placement",
    "Ranks",
    "Row",
    "Schedule",
    "Simulation",
    "VersionUse",
    "Weights",
    "best",
    "build",
    "candidates",
    "forward_rounds",
    "known_schedules",
    "read_costs",
    "save_picture",
    "version_use",
    "weight_versions",
    "with_communication",
]
