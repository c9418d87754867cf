"""How the launchers of several nodes find each other, agree, and stay in contact."""
