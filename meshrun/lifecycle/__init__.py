"""What a launch does next: one pure state machine, advance(state, event) -> (state, actions).

``phases`` lists the phases; docs/explanation/lifecycle.md draws their transitions.
``local`` handles events on this node, ``other_nodes`` those on other nodes. ``restart`` decides
whether ranks restart, ``blame`` which failure was the cause, ``outcome`` the exit code.
"""
