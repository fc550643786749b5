"""The way of reports from one worker to the scheduler: late, lost, doubled, and now and then out of order."""

from typing import final

from tpu_offload import StepReport


@final
class Channel:
    """Carries reports. What goes wrong is asked for beforehand and happens to the next report.

    Args:
      delay: steps that a report is on its way.
    """

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.mute_until = 0
        self.num_to_drop = 0
        self.num_to_double = 0
        self.hold_for = 0
        self._on_the_way: list[tuple[int, StepReport]] = []

    def send(self, report: StepReport, step: int) -> None:
        if step < self.mute_until:
            return
        if self.num_to_drop:
            self.num_to_drop -= 1
            return
        due = step + self.delay + self.hold_for
        self.hold_for = 0
        self._on_the_way.append((due, report))
        if self.num_to_double:
            self.num_to_double -= 1
            self._on_the_way.append((due + 2, report))

    def delay_all(self, num_steps: int) -> None:
        """What is on the way takes longer."""
        self._on_the_way = [(due + num_steps, report) for due, report in self._on_the_way]

    def receive(self, step: int) -> list[StepReport]:
        """What has arrived."""
        arrived = [report for due, report in self._on_the_way if due <= step]
        if arrived:
            self._on_the_way = [entry for entry in self._on_the_way if entry[0] > step]
        return arrived
