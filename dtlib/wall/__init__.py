"""``dtlib wall``: a page that shows where the learners of a room are, for whoever gives the course.

room.py     what is known of all learners, and what the page shows of it
server.py   who may say what, how often and how much; the page
site/       the page: what others wrote is shown as text alone
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

PORT = 8790


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all of this machine)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen on (default: {PORT})")
    parser.add_argument("--keep", metavar="FILE", type=Path, help="keep what the page shows; nothing is kept without")
    parser.add_argument("--delete", metavar="FILE", nargs="?", const="", help="delete what was kept, and all codes")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(options: Namespace) -> int:
    from dtlib.wall import kept, server

    if options.delete is not None:
        return kept.delete(Path(options.delete) if options.delete else None)
    return server.serve(options.host, options.port, options.keep, not options.no_browser)
