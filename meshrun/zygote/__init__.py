"""The zygote: one process per node that imports torch once and starts the ranks."""
