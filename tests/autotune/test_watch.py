"""What lies between two Snapshots."""

from autotune.watch import new_steps
from telemetry.events import StepReport


def test_a_step_that_is_under_way_at_a_look_is_of_the_time_after_it() -> None:
    """A look at 300 is told of the step that began at 200 only later: it began before that look, and is new."""
    told, under_way = StepReport(at_ns=100, step=1), StepReport(at_ns=200, step=2)
    assert new_steps([told], [told, under_way]) == [under_way]
    assert new_steps([], [told]) == [told]
    assert new_steps([told], [told]) == []
