"""Which scheduler or launcher started this process, read from its environment alone."""

from meshrun.cluster.cluster_facts import ClusterFacts, Task, derive_port
from meshrun.cluster.detect import Surroundings, detect_cluster

__all__ = ["ClusterFacts", "Surroundings", "Task", "derive_port", "detect_cluster"]
