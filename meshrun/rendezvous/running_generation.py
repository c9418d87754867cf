"""The generation that runs on all nodes, as reported to the coordinator."""

from __future__ import annotations

from meshrun.protocol.collectives import AskTimes
from meshrun.protocol.events import (
    AllCleared,
    GenerationAborted,
    OthersFinished,
    ShowStacks,
    TimesReported,
)
from meshrun.protocol.generation import NodeOutcome
from meshrun.rendezvous.connection import Connection, send_all
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.messages import (
    Cleared,
    Failed,
    Finished,
    Leave,
    Message,
    Times,
)

OWN = 0
"""The coordinator's own number among the nodes: it is always the first."""


class RunningGeneration:
    """Collects the nodes' reports on one generation, and announces what follows from them.

    Two facts tell where it is until nothing is left on any node, and the coordinator's launch
    decides what is next:

    - Neither ``asked_to_stop`` nor ``has_finished``: ranks run. An elastic launch may stop them to
      grow.
    - ``asked_to_stop`` alone: a node has failed or was lost, or another one joins.
    - ``has_finished`` alone: ranks exit. An elastic launch can do without a node that is lost now.
    - Both: a rank failed as it exited.

    Args:
        connections: To the other nodes that take part, by number; the owner removes lost ones.
    """

    def __init__(
        self,
        generation: int,
        connections: dict[int, Connection],
        *,
        world_size: int,
        hub: Hub,
    ) -> None:
        self.generation, self.connections, self._hub = generation, connections, hub
        self._world_size = world_size
        self.outcomes: dict[int, NodeOutcome] = {}
        self._finished: set[int] = set()
        self._cleared: set[int] = set()
        self.loss = ""
        """The first loss of a node in this generation, or since it ended."""
        self.asked_to_stop = False
        """Whether the nodes have been asked to stop their ranks, or the launch is over."""
        self.has_finished = False
        """Whether every program has finished, and ranks may exit."""

    def send(self, message: Message) -> None:
        """Carry out a message of this node's own launch, and send the others what they need."""
        match message:
            case Failed():
                self._fail(OWN, message.outcome)
            case Finished():
                self._finished.add(OWN)
                self._announce_if_all_finished()
            case Cleared():
                self._cleared.add(OWN)
                self.advance()
            case ShowStacks() | AskTimes():
                self.broadcast(message)

    def receive(self, number: int, connection: Connection, message: Message) -> None:
        """Handle another node's message, unless it is about another generation."""
        if getattr(message, "generation", None) != self.generation:
            return
        match message:
            case Failed() | Cleared() | Times() if message.last_rank >= self._world_size:
                connection.close(f"it reported rank {message.last_rank} of {self._world_size}")
            case Failed():
                self.outcomes[number] = message.outcome
                self._fail(number, message.outcome)
            case Cleared():
                self.outcomes[number] = message.outcome
                self._cleared.add(number)
                self.advance()
            case Finished():
                self._finished.add(number)
                self._announce_if_all_finished()
            case Leave():
                self.outcomes.setdefault(number, NodeOutcome(is_well=True))
                connection.close(message.why)
            case Times():
                clock = connection.clock
                answers = [answer.shifted(-clock.ahead_ns) for answer in message.answers]
                unsure_ns = clock.unsure_ns(self._hub.now_ns())
                self._hub.events.append(
                    TimesReported(answers=answers, unsure_ns=unsure_ns, why=message.why)
                )

    def _fail(self, number: int, outcome: NodeOutcome) -> None:
        """Stop the ranks of all other nodes, once, as one node failed."""
        title = ""
        if outcome.is_hung:  # without the reason: to that node, other ranks are "on another node"
            title = outcome.headline.partition(": ")[0]
        elif any(rank_state.has_timed_out for rank_state in outcome.ranks.values()):
            title = "a collective timed out: showing where the ranks are"
        end = GenerationAborted(
            why=outcome.headline or "a rank failed",
            signum=outcome.signum,
            title=title,
            at_ns=self._hub.now_ns(),
        )
        if self.end(end, but=number) and number != OWN:
            self._hub.events.append(end)

    def end(self, end: GenerationAborted, *, but: int = OWN) -> bool:
        """Ask the nodes, once, to stop their ranks; return whether this was the first time."""
        if self.asked_to_stop:
            return False
        self.asked_to_stop = True
        self.broadcast(end, but=but)
        return True

    def close(self) -> None:
        """Ask the nodes for nothing more, as the launch is over."""
        self.asked_to_stop = True

    def _announce_if_all_finished(self) -> None:
        if self._are_all(self._finished):
            self.has_finished = True
            self.broadcast(finished := OthersFinished(at_ns=self._hub.now_ns()))
            self._hub.events.append(finished)

    def advance(self) -> None:
        """Request this node's decision once nothing is left on any node."""
        if self._are_all(self._cleared):
            self._cleared.discard(OWN)  # request it once
            outcomes = tuple(self.outcomes.values())
            self._hub.events.append(AllCleared(outcomes=outcomes, at_ns=self._hub.now_ns()))

    def _are_all(self, numbers: set[int]) -> bool:
        """Return whether these are all nodes; lost ones may be among them."""
        return len(numbers) > len(self.connections) and numbers >= {OWN, *self.connections}

    def broadcast(self, message: Message, *, but: int = OWN) -> None:
        """Send a message to all other nodes, or to all but one."""
        send_all((each for number, each in self.connections.items() if number != but), message)
