"""Detection of the scheduler or launcher that started this process, from its environment."""

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, Task, derive_port
from meshrun.cluster.detect import detect_cluster

__all__ = ["ClusterFacts", "Surroundings", "Task", "derive_port", "detect_cluster"]
