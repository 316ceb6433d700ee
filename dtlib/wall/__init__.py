"""``dtlib wall``: a page that shows where the learners of a room are, for whoever gives the course.

notebook.py in a learner's notebook: lab.join, lab.leave, and what is sent in between; known.py, what is known of one
room.py     what is known of all learners, and what the page shows of it
server.py   who may say what, how often and how much; the page
kept.py     codes and keys, in files
site/       the page: what others wrote is shown as text alone
"""

from argparse import ArgumentParser, Namespace

from dtlib.errors import number, read_number

PORT = 8790


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all of this machine)")
    port = f"port to listen on (default: {PORT}; 0: one that is free)"
    parser.add_argument("--port", type=lambda it: number("--port", read_number(it), 0, 65_535), default=PORT, help=port)
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(options: Namespace) -> int:
    from dtlib.wall import server

    return server.serve(options.host, options.port, not options.no_browser)
