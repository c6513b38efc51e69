"""The plan as Python sees it."""

import json


class Plan:
    """Dtype, place and bytes of every part and what travels in a step.

    ``str(plan)`` is the table; ``plan.as_dict()`` has the same as numbers.
    """

    def __init__(self, engine, integration):
        self._engine = engine
        self.integration = integration.name

    def __str__(self):
        return (f"{self._engine.plan_table()}\nTrainer: {self.integration}\n"
                f"Ranks: connected by {self.connected_by}")

    def as_dict(self):
        """All rows and collectives; bytes are per rank."""
        return json.loads(self._engine.plan_json())

    @property
    def connected_by(self):
        """What carries the collectives: ``"torch gloo"``, ``"mpi"``, ``"self"`` for one rank."""
        return self._engine.backend()

    @property
    def state_bytes(self):
        """Bytes that the engine keeps on this rank, without the model's weights."""
        return self._engine.planned_state_bytes()

    @property
    def bytes_per_parameter(self):
        """All rows, weight included, per parameter of this rank's model."""
        return self._engine.bytes_per_parameter()

    @property
    def allocated_bytes(self):
        """Bytes that are allocated now, by component: what the plan is compared with."""
        return self._engine.allocated_bytes()
