"""What a launch does next: one pure state machine, step(state, event) -> (state, actions).

``phases`` has the phases and what may follow each; docs/explanation/lifecycle.md draws them.
``local`` decides after events on this node, ``other_nodes`` after events on others, ``restart``
whether ranks start again, ``blame`` which failure was the cause, ``outcome`` the exit code.
"""
