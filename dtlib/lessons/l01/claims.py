"""Claims about distributed training on trial: the verdict, and how one gets to it. Row by row as in data/claims.csv."""

HOLDS, FAILS, DEPENDS, UNSAID = "holds", "does not hold", "it depends", "cannot be said"
VERDICTS = (HOLDS, FAILS, DEPENDS, UNSAID)

OF_THE_TEXTS = (
    (FAILS, "measured above, and in lesson 02: one core of a CPU needs far less"),
    (UNSAID, "the machine that the text names has one GPU by its maker's list"),
    (DEPENDS, "60 s and 10 s are a factor of 6; with 49 s, 'about a minute', almost 5 is right: lesson 02"),
    (DEPENDS, "MPI may start the ranks; gradients travel by NCCL, or gloo on CPUs (DeepSpeed's documentation)"),
    (DEPENDS, "until about 2018; the picture above shows the years after"),
    (DEPENDS, "more than that from 2018 to 2020, far less since: the picture above"),
    (DEPENDS, "lesson 10 measures it: on one model and machine, with the same batch and precision"),
    (UNSAID, "a setting and no result: lesson 05 has what a batch that grows with the ranks does"),
    (HOLDS, "S. Rajbhandari et al., arXiv:1910.02054: 100 billion on 400 GPUs, in 2019"),
    (UNSAID, "against which library, on which network and model? The text does not say"),
    (UNSAID, "the same: a cost needs a price and a time, and neither is named"),
    (FAILS, "lesson 04: seven changes around the loop"),
    (HOLDS, "P. Buchlovsky et al., arXiv:1902.00465, say so themselves"),
    (FAILS, "--num_gpus counts those of one node: 2 x 8 = 16"),
)

# Five more of the same texts: the claim, the verdict, and how one gets to it.
MORE = (
    (
        "more GPUs give faster convergence",
        DEPENDS,
        "lesson 05: in hours often, until the batch is too large; an epoch has fewer steps, and may teach less",
    ),
    ("data parallelism spreads one model over GPUs", FAILS, "measured above: each rank holds all of it"),
    ("updates must sit on a parameter server", FAILS, "lesson 04: a ring sends less from the busiest rank"),
    (
        "DeepSpeed needs no refactoring",
        DEPENDS,
        "lesson 10: backward and step move to the engine; a pipeline asks more",
    ),
    (
        "almost all data can be parallelised, and not all models",
        DEPENDS,
        "lesson 05: the batch has a limit; lesson 06: any model can be sharded",
    ),
)
