"""Communication between ranks: the verbs and where they wait."""

from dtlib.comm.communicator import Communicator

__all__ = ["Communicator"]
