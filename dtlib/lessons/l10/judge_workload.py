"""Lesson 10: check of a learner's workload by its parts, its evaluation of known models, and training."""

from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l10.observe_workload import KNOWN, STEPS, observe_workload


def judge_workload(seen: list) -> None:
    """Check loss, evaluation and training of a workload."""
    for rank, it in enumerate(seen):
        wrong = rows(rank)
        wrong("no-workload", it["kind"] != "Workload", "a Workload", f"a {it['kind']}",
              "What does the function return?", "return Workload(name=..., model=..., ...)")
        wrong("incomplete", "odd" in it, "a Workload with model, train, test, loss_fn and evaluate", it.get("odd"),
              "train(my_workload) uses each of them. Where do you create it?",
              "An nn.Module, two data sets of pairs, and two functions.")
        wrong("shape", it["shape"] != [12, 10], "outputs (12, 10) for 12 images", f"outputs {tuple(it['shape'])}",
              "There are ten classes. How many scores does each image need?", "The last layer is nn.Linear(..., 10).")
        wrong("other-parameters", it["parameters"] != seen[0]["parameters"], "a model with the parameters of rank 0",
              "others", "Without a fixed seed, ranks start from different random numbers. Where do you set the seed?",
              "torch.manual_seed(0), the same on all ranks, before you create the layers.")
        wrong("image-shape", it["image"] != [64], "images of shape (64,), as in digits.split()",
              f"{tuple(it['image'])}",
              "The model receives images (n, 64). Which layer gives them the shape for a convolution?",
              "Do not change the data; the model may start with nn.Unflatten(1, (1, 8, 8)).")
        _judge_loss(it, rank)
        wrong("train-shared-out", it["trains on"] != seen[0]["trains on"],
              f"the training set of rank 0, with {seen[0]['trains on'][0]} images",
              f"another training set, with {it['trains on'][0]} images",
              "What divides a batch: the data set, or the loader?",
              "The loader does. Pass the whole training set to it on every rank.")
        wrong("tested-on-train", it["in train"] > 0.1, "test images that are not in the training set",
              f"{it['in train']:.0%} of the test images are in train",
              "What does this accuracy say about new images?", "(x, y), (test_x, test_y) = digits.split()")
    for which in range(2):
        _judge_evaluate([it["evaluated"][which] for it in seen])
    for rank, it in enumerate(seen):
        _judge_training(it, rank)


def _judge_loss(it, rank: int) -> None:
    hints = ("Each rank computes the mean loss of its part, and ranks average. Which line divides again?",
             "cross_entropy has reduction='mean' by default. Do not divide again.")
    wrong = rows(rank)
    wrong("no-mean", "losses" in it, "one number: the mean over samples", f"{it.get('losses')} numbers", *hints)
    if not abs(it["whole"] - it["mean"]) <= 1e-4 * max(1, abs(it["whole"])):  # also true for NaN
        expected = f"a mean over samples: {it['mean']:.4f} from two parts"
        wrong("no-mean", True, expected, f"{it['whole']:.4f}", *hints)
    ratio = it["ratios"][0]
    wrong("scaled", abs(ratio - 1) > 1e-4 and all(abs(other - ratio) < 1e-4 for other in it["ratios"]),
          "a mean over samples", f"{ratio:.3g} times the mean cross-entropy", *hints)
    if it["whole"] < 0:
        hint = "A cross-entropy is never negative. Does this loss need scores, or logarithms of probabilities?"
        if it.get("probabilities"):
            hint = "nn.NLLLoss needs logarithms of probabilities, and receives probabilities."
        cure = "Return scores from the model, without a softmax, and use loss_fn=cross_entropy."
        wrong("negative-loss", True, "a loss that is not below 0", f"{it['whole']:.4f}", hint, cure)
    wrong("ignores-targets", all(abs(other - it["whole"]) <= 1e-9 for other in it["with others"]),
          "another loss if targets are exchanged between images", "the same loss",
          "Does loss_fn(outputs, targets) use the targets?", "loss_fn=cross_entropy")


def _judge_evaluate(found: list) -> None:
    """Check evaluations on all ranks, and on all ranks but the last, which then runs alone."""
    ranks, n = found[0]["ranks"], found[0]["images"]
    # Observations from the same number of ranks belong to one evaluation.
    alike = [one for one in found if one["ranks"] == ranks]
    shown = {place for one in alike for place in one["seen"]}
    for rank, one in enumerate(found):
        where = f", on {one['ranks']} ranks" if one["ranks"] > 1 else ", on one rank"
        if "of the world" in one:
            raise Wrong("world-comm", rank, "every call on comm, the argument of evaluate", one["of the world"],
                        "The caller decides which ranks evaluate. Must all ranks of the world take part?",
                        "Use comm instead of world.comm.")
        if "odd" in one:
            raise Wrong("no-accuracy", rank, 'evaluate(model, comm) returns {"accuracy": ...}', one["odd"],
                        "Return a dictionary, so that a workload may have several metrics.",
                        'return {"accuracy": right / len(test_y)}')
        got, wanted = one["figures"], one["wanted"]
        if all(abs(got[name] - wanted[name]) < 1e-6 for name in KNOWN):
            if one["trains"] and one["random"]:
                raise Wrong("training-mode", rank, "a model in eval mode during the evaluation",
                            f"training mode: {one['random']}",
                            "How does such a layer differ between training and evaluation?",
                            "Call model.eval() in evaluate, before the images.")
            continue
        name = next(name for name in KNOWN if abs(got[name] - wanted[name]) >= 1e-6)
        expected = f"accuracy {wanted[name]:.4f}: the model has {name} of {n} test images right{where}"
        wrong = rows(rank, expected)
        wrong("other-images", one["strange"], f"{one['strange']} images passed to the model are not in test",
              "Which images does evaluate pass to the model?", "Use all of test_x, and none of x.")
        wrong("own-slice",
              any(abs(other["figures"][key] - got[key]) > 1e-6 for other in alike for key in KNOWN if other is not one),
              f"{got[name]:.4f}, and another figure on another rank",
              "A rank may evaluate a part, but must return the result for the whole. How do you combine parts?",
              "comm.all_reduce(right), the number of right answers, and then / len(test_y).")
        wrong("second-best", set(got.values()) == {1.0}, "1, for models whose second best answer is right",
              "Which of the ten scores is the answer?", "model(test_x).argmax(1) == test_y")
        wrong("ignores-model", len(set(got.values())) == 1, f"{got[name]:.4f}, as for every other model",
              "Which model does evaluate use: the one in its argument?",
              "def evaluate(model, comm): call model(...), and no name from outside.")
        if one["ranks"] == ranks and (lost := n - len(shown)):
            raise Wrong("left-out", rank, f"all {n} test images are used{where}",
                        f"{lost} on no rank, such as number {min(set(range(n)) - shown)}",
                        f"Does {n} divide by {ranks}? Which rank gets the rest?" if lost < ranks else
                        "Does your code contain a number of images, or a batch size? All images count.",
                        "test_x[comm.rank :: comm.size]")
        _explain_figure(rank, expected, got, wanted, one["ranks"], n)


def _explain_figure(rank: int, expected: str, got: dict, wanted: dict, ranks: int, n: int) -> None:
    """Recognise the mistake in a figure that is wrong, but equal on all ranks and of all images."""
    said = ", ".join(f"{got[name]:.4g} where {wanted[name]:.4f} is right" for name in KNOWN)

    def is_it(of_right) -> bool:
        return all(abs(got[name] - of_right(wanted[name])) < 1e-4 * max(1, abs(got[name])) for name in KNOWN)

    wrong = rows(rank, expected)
    for of_right, mistake, asks, says in (
        (lambda right: 100 * right, "percent", "This is in percent.", "Return a fraction: right / len(test_y)."),
        (lambda right: n * right, "a-count", "This is the number of right answers.", "/ len(test_y)"),
        (lambda right: 1 - right, "error-rate", "This falls if a model improves.", "Count where argmax == label."),
        (lambda right: ranks * right, "added-up", "All ranks evaluated all images, and their sum is too large.",
         "Give each rank a part, or do not call all_reduce."),
        (lambda right: right / ranks, "divided-again", "Whose right answers do you count? How often do you divide?",
         "comm.all_reduce(right).item() / len(test_y)"),
    ):
        wrong(mistake, is_it(of_right), said, asks, says)
    wrong("mean-of-means", all(abs(got[name] - wanted[name]) < 0.02 for name in KNOWN), said,
          "This is nearly right. Do you average accuracies of ranks or batches with different sizes?",
          "Add the right answers of all batches and ranks; then / len(test_y).")
    wrong("accuracy", True, said, "Which answers count as right, and by how many do you divide?",
          "(model(test_x).argmax(1) == test_y).sum(), over all ranks' parts, / len(test_y).")


def _judge_training(it, rank: int) -> None:
    wrong = rows(rank)
    if not it["last"] < 0.7 * it["first"]:
        hints = ("Do images and labels match, and are all parameters in the model?",
                 "Does a ReLU follow the last layer? Are labels in the order of the images?")
        if it["probabilities"]:
            hints = ("The outputs of an image add up to 1.", "cross_entropy needs scores: remove the softmax.")
        wrong("does-not-learn", True, f"a loss that falls by a third in {STEPS} steps",
              f"{it['first']:.3f} at first, {it['last']:.3f} at last", *hints)
    wrong("learns-something-else", it["accuracy"] < 0.3, f"an accuracy above 0.3 after {STEPS} steps",
          f"{it['accuracy']:.3f}, though the loss falls", "Training and test use different labels. Compare the two.",
          "Both pairs of digits.split() number the classes in the same way: change neither.")


EXERCISES = {"wrap-a-model": Exercise("my_workload", observe_workload, judge_workload)}
