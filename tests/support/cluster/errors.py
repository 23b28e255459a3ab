"""What can be said when the harness cannot do its job."""


class CannotRun(Exception):
    """This machine lacks something; the text says what, and the command that brings it."""


class DidNotStart(Exception):
    """A program of the cluster ended, or was not ready in time; the text ends with its last words."""
