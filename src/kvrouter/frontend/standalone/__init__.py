"""The door of a standalone router: for engines that somebody else fronts."""
