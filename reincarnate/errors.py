"""The one exception for what a user can put right."""


class UserError(Exception):
    """Something a user caused and can mend: one line that says what, with which input, and what to do.

    The command line prints it on stderr and exits with code 2, without a traceback.
    """
