"""Wrong explanations of the hangs of lesson 03, and the mistake that the check must recognise in each."""


def answers_to_hangs():
    """Wrong explanations: what was answered, and the mistake."""
    right = {1: (2, 3), 2: (1, 3), 3: (0, 5), 4: (0, 4), 5: (0, 4)}
    return {
        "nothing": ({}, "unexplained"),
        "only some": ({1: (2, 3)}, "unexplained"),
        "a list": ([(2, 3)], "type"),
        "only ranks": ({1: 2}, "type"),
        "who waits instead of whom": ({**right, 1: (0, "comm.broadcast(settings, root=0)")}, "rank"),
        "an innocent line": ({**right, 2: (1, "gradient = torch.ones(4)")}, "line"),
        "where the others wait in hang 1": ({**right, 1: (2, 4)}, "where-others-wait"),
        "where the others wait in hang 2": ({**right, 2: (1, "comm.all_reduce(gradient)")}, "where-others-wait"),
        "another rank's line": ({**right, 4: (0, "comm.recv(batch, 0, tag=2)")}, "line"),
        "counted from %%px": ({**right, 3: (0, 6)}, "line"),
        "ranks in quotes": ({**right, 1: ("2", "3")}, "quoted"),
        "half a word": ({**right, 5: (0, "com")}, "line"),
    }
