"""Everything that runs in the zygote, the store process and the ranks."""
