"""Which requests are open, and under which label.

Owns the two ways to find sequences from outside: by request, and by group.
"""

from dovetail.errors import InvariantError
from dovetail.sched.sequence import Sequence
from dovetail.wire.request import Request


class OpenRequests:
    """The sequences of requests that have not had their last event. Loop thread only."""

    def __init__(self) -> None:
        self._sequences: dict[int, list[Sequence]] = {}
        self._groups: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._sequences)

    def add(self, request: Request, sequences: list[Sequence]) -> None:
        """Remember a request and its generations."""
        if request.request_id in self._sequences:
            raise InvariantError(f"request id {request.request_id} is used twice")
        self._sequences[request.request_id] = sequences
        if request.group is not None:
            self._groups.setdefault(request.group, set()).add(request.request_id)

    def remove(self, sequence: Sequence) -> None:
        """Forget a generation that has had its last event."""
        request = sequence.request
        siblings = self._sequences[request.request_id]
        siblings.remove(sequence)
        if siblings:
            return
        del self._sequences[request.request_id]
        if request.group is not None:
            members = self._groups[request.group]
            members.remove(request.request_id)
            if not members:
                del self._groups[request.group]

    def of_request(self, request_id: int) -> list[Sequence]:
        """Return the open generations of a request; none of an unknown or ended one."""
        return list(self._sequences.get(request_id, ()))

    def of_group(self, group: str) -> list[Sequence]:
        """Return the open generations of all requests with a label, oldest request first."""
        ids = sorted(self._groups.get(group, ()))
        return [sequence for request_id in ids for sequence in self._sequences[request_id]]

    def sequences(self) -> list[Sequence]:
        """Return all open generations."""
        return [sequence for siblings in self._sequences.values() for sequence in siblings]
