"""Teachers: from a reference to a frozen policy, its return and its rollouts."""
