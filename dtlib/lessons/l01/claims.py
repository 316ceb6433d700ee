"""Verdicts and reasons for six claims about distributed training, from data/claims.csv and its texts."""

HOLDS, FAILS, DEPENDS, UNSAID = "holds", "does not hold", "it depends", "cannot be said"
VERDICTS = (HOLDS, FAILS, DEPENDS, UNSAID)

CLAIMS = (
    ("compute doubles every 3.5 months", DEPENDS, "until about 2018; the figure shows the years after"),
    ("data parallelism spreads one model over GPUs", FAILS, "measured above: each rank holds all of it"),
    (
        "DeepSpeed trains models of 100 billion parameters",
        HOLDS,
        "S. Rajbhandari et al., arXiv:1910.02054: on 400 GPUs, in 2019",
    ),
    (
        "DeepSpeed is 4 to 5 times faster than others",
        UNSAID,
        "than which library, on which network and model? The text does not say",
    ),
    (
        "more GPUs give faster convergence",
        DEPENDS,
        "in hours often, until the batch is too large: lesson 05; an epoch has fewer steps, and may teach less",
    ),
    ("--num_nodes 2 --num_gpus 8 uses 8 GPUs", FAILS, "--num_gpus counts the GPUs of one node: 2 x 8 = 16"),
)
