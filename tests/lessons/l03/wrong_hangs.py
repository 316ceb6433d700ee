"""Wrong explanations of the hangs of lesson 03, and the mistake that the check must recognise in each."""

RIGHT = {1: (2, 3), 2: (1, 3), 3: (0, 5), 4: (0, 4), 5: (0, 4)}

NAMED = {
    "hangs": {
        "nothing": ({}, "unexplained"),
        "only some": ({1: (2, 3)}, "unexplained"),
        "a list": ([(2, 3)], "type"),
        "only ranks": ({1: 2}, "type"),
        "who waits instead of whom": ({**RIGHT, 1: (0, "comm.broadcast(settings, root=0)")}, "rank"),
        "an innocent line": ({**RIGHT, 2: (1, "gradient = torch.ones(4)")}, "line"),
        "where the others wait in hang 1": ({**RIGHT, 1: (2, 4)}, "where-others-wait"),
        "where the others wait in hang 2": ({**RIGHT, 2: (1, "comm.all_reduce(gradient)")}, "where-others-wait"),
        "another rank's line": ({**RIGHT, 4: (0, "comm.recv(batch, 0, tag=2)")}, "line"),
        "counted from %%px": ({**RIGHT, 3: (0, 6)}, "line"),
        "ranks in quotes": ({**RIGHT, 1: ("2", "3")}, "quoted"),
        "an if that lets it through": ({**RIGHT, 4: (1, "if comm.rank == 1:")}, "line"),
        "half a word": ({**RIGHT, 5: (0, "com")}, "line"),
    },
}
