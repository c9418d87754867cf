"""What a launch does next: one pure state machine, step(state, event) -> (state, actions)."""
