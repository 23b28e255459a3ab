"""What can be said when the harness cannot do its job."""


class CannotRun(Exception):
    """This machine lacks something; the text says what, and the command that brings it."""


class DidNotBuild(Exception):
    """A program could not be built where all that is needed for it is there; the text ends with what was said."""


class DidNotStart(Exception):
    """A program of the cluster ended, or was not ready in time; the text ends with its last words."""
