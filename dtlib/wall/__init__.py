"""``dtlib wall``: a page for instructors that shows the place of each learner in the course.

notebook.py in a learner's notebook: lab.join, lab.leave, and the messages in between
learner_state.py    the state of one learner
room.py     the state of all learners, and the content of the page
server.py   the HTTP server: who may send, how often and how much; the page
secrets_file.py     codes and keys, in files
site/       the page; text of learners is shown as plain text
"""

from argparse import ArgumentParser, Namespace

from dtlib.errors import number, read_number

PORT = 8790


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``dtlib wall`` to its parser."""
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all of this machine)")
    port = f"port to listen on (default: {PORT}; 0: one that is free)"
    parser.add_argument("--port", type=lambda it: number("--port", read_number(it), 0, 65_535), default=PORT, help=port)
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(options: Namespace) -> int:
    """Serve the wall until it is stopped; return the exit status."""
    from dtlib.wall import server

    return server.serve(options.host, options.port, not options.no_browser)
