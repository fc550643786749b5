"""The channel from one worker to the scheduler: reports can be late, lost, duplicated or reordered."""

from typing import final

from tpu_offload import StepReport


@final
class Channel:
    """Carries reports. Faults are armed in advance and apply to the next reports.

    Args:
      delay: steps until a report arrives.
    """

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.mute_until = 0
        self.num_to_drop = 0
        self.num_to_double = 0
        self.hold_for = 0
        self._in_flight: list[tuple[int, StepReport]] = []

    def send(self, report: StepReport, step: int) -> None:
        if step < self.mute_until:
            return
        if self.num_to_drop:
            self.num_to_drop -= 1
            return
        due = step + self.delay + self.hold_for
        self.hold_for = 0
        self._in_flight.append((due, report))
        if self.num_to_double:
            self.num_to_double -= 1
            self._in_flight.append((due + 2, report))

    def delay_all(self, num_steps: int) -> None:
        """Delays all reports in flight."""
        self._in_flight = [(due + num_steps, report) for due, report in self._in_flight]

    def receive(self, step: int) -> list[StepReport]:
        """The reports that have arrived."""
        arrived = [report for due, report in self._in_flight if due <= step]
        if arrived:
            self._in_flight = [entry for entry in self._in_flight if entry[0] > step]
        return arrived
