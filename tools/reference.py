"""The public names and their docstrings, as a page of the book."""

import inspect
from importlib import import_module

PACKAGES = {
    "dtlib": "World, tracing and training",
    "dtlib.comm": "Operations among ranks",
    "dtlib.parallel.data": "Data parallelism",
    "dtlib.horovod": "Horovod's way",
    "dtlib.parallel.zero": "ZeRO",
    "dtlib.parallel.pipeline": "Pipelines",
    "dtlib.schedule": "Schedules",
    "dtlib.parallel.tensor": "Tensor parallelism",
    "dtlib.parallel.context": "Long sequences",
    "dtlib.parallel.expert": "Experts",
    "dtlib.parallel.local": "Local steps",
    "dtlib.parallel.compression": "Gradients made small",
    "dtlib.parallel.replicator": "TF-Replicator's model",
    "dtlib.training": "Engines and configurations",
    "dtlib.checkpoint": "Checkpoints",
    "dtlib.recovery": "Faults",
    "dtlib.storage": "Data input",
    "dtlib.planner": "The planner",
}
# Where our own classes end: what torch's classes have is in torch's reference.
OTHERS = "Module, Optimizer, Function, Sampler, Future, Exception, object"


def public(package: str) -> list[str]:
    module = import_module(package)
    names = getattr(module, "__all__", None) or getattr(module, "_LAZY", None) or vars(module)
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    ours = [name for name, value in found.items() if str(getattr(value, "__module__", "")).startswith("dtlib")]
    return [name for name in ours if callable(found[name]) and inspect.getdoc(found[name])]


def page() -> str:
    parts = ["# Reference\n\nFrom the docstrings. `CONTRIBUTING.md` in the repository has the map of the packages.\n"]
    for package, title in PACKAGES.items():
        if not (names := public(package)):
            continue
        parts.append(f"## {title}: `{package}`\n\n```{{eval-rst}}")
        for name in names:
            kind = "class" if inspect.isclass(getattr(import_module(package), name)) else "function"
            parts.append(f".. auto{kind}:: {package}.{name}")
            parts.append(f"   :members:\n   :inherited-members: {OTHERS}\n" if kind == "class" else "")
        parts.append("```\n")
    return "\n".join(parts)
