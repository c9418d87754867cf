"""Which scheduler or launcher started this process, read from its environment alone."""

from meshrun.cluster.detect import detect_cluster
from meshrun.cluster.facts import ClusterFacts, Task, derive_port

__all__ = ["ClusterFacts", "Task", "derive_port", "detect_cluster"]
