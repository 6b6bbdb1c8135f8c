"""The house stands: imports go down, one file talks to other ranks, one file knows Lightning's internals."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch.distributed as dist

import lightning_zero

PACKAGE = Path(lightning_zero.__file__).parent

FLOORS = {
    "placements": 0, "precision": 0, "autocast": 0, "_lightning": 0,
    "watch": 0, "progress": 0, "collectives": 1, "layout": 1, "cut": 1, "units": 1,
    "host_memory": 0, "modes": 0, "stepping": 0, "saved_hooks": 0, "unfit_optimizers": 0, "kept_results": 0,
    "flat_buffer": 2,
    "offload": 2, "lane": 2, "stash": 2, "activation": 2, "activation_bytes": 2,
    "boxes": 1, "slicing": 3, "pieces": 3,
    "sharded_parameter": 3, "sharded_ops": 3, "sharded_reductions": 3, "whole_parameter": 3,
    "partition": 3, "main_weights": 3, "param_group": 4, "param_hooks": 4, "gradients": 4, "arrivals": 4,
    "unit": 5, "window": 5, "windowed_forward": 5, "substitutes": 4, "compiled": 5, "reducer": 5, "lockstep": 5,
    "group_plan": 2, "in_flight": 2, "holders": 4, "blueprint": 5, "offloading": 5, "assembly": 5,
    "engine": 6, "sharding": 6, "copies": 6, "gathering": 6, "held": 6, "host": 6, "checkpoint": 6,
    "planner": 6, "recording": 6, "out_of_memory": 6, "monitor_report": 0, "resident": 0, "monitor": 7,
    "callbacks": 7, "strategy": 7, "cli": 7, "__init__": 7,
}  # fmt: skip

COLLECTIVES = {
    name for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "monitored_barrier", "send",
                        "recv", "isend", "irecv", "batch_isend_irecv", "_all_gather", "_reduce_scatter",
                        "_broadcast_coalesced"))
    and callable(getattr(dist, name)) and not isinstance(getattr(dist, name), type)
}  # fmt: skip

PUBLIC = [
    "STAGES",
    "ActivationPolicy",
    "CheckpointError",
    "Estimate",
    "HostMemory",
    "MappedFile",
    "MovedBytes",
    "OffloadActivations",
    "OffloadError",
    "OffloadTarget",
    "PlanError",
    "PrecisionRecipe",
    "PytorchLightningZeROStrategy",
    "RanksDifferError",
    "Recompute",
    "Selective",
    "ZeROMonitor",
    "ZeROStrategy",
    "activation_bytes",
    "estimate",
    "gathered",
    "held_bytes",
    "load_pretrained",
    "moved_bytes",
    "no_sync",
    "planned_bytes",
    "save_pretrained",
    "shard",
    "unshard",
]


def files():
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    """Name below the package: "engine", "checkpoint.one_file", "__init__"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def floor_of(module):
    return FLOORS[module.split(".")[0]]


def imports(path):
    """Modules of the package that ``path`` imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names = [node.module or ""]
            if node.module == "lightning_zero":
                names = [f"lightning_zero.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "lightning_zero":
                found.add("__init__")
            elif name.startswith("lightning_zero."):
                found.add(name.removeprefix("lightning_zero."))
    return found


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_every_file_has_a_floor(path):
    """A new file says where it lives."""
    assert module_of(path).split(".")[0] in FLOORS


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_imports_only_go_down(path):
    """Or stay on their floor."""
    here = floor_of(module_of(path))
    above = {name for name in imports(path) if floor_of(name) > here}
    assert not above, f"{module_of(path)} is on floor {here} and imports {sorted(above)}"


def test_no_imports_go_in_a_circle():
    """Within a floor too: each file can be read after those that it imports."""
    graph = {module_of(path): imports(path) for path in files()}
    done, path_here = set(), []

    def visit(module):
        assert module not in path_here, f"circle: {[*path_here, module]}"
        if module in done or module not in graph:
            return
        path_here.append(module)
        for other in graph[module]:
            visit(other)
        path_here.pop()
        done.add(module)

    for module in graph:
        visit(module)


def _names_of_distributed(tree):
    """Local names that stand for torch.distributed, and what is imported out of it."""
    modules, members = {"torch.distributed"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name for a in node.names if a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "torch":
                modules |= {a.asname or a.name for a in node.names if a.name == "distributed"}
            elif node.module.startswith("torch.distributed"):
                members |= {a.name for a in node.names}
    return modules, members


@pytest.mark.parametrize("path", [p for p in files() if p.name != "collectives.py"], ids=module_of)
def test_only_collectives_py_talks_to_other_ranks(path):
    """So every byte is counted, and a renamed function of torch is absorbed in one place."""
    tree = ast.parse(path.read_text())
    modules, members = _names_of_distributed(tree)
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules
    }
    assert not (used | members) & COLLECTIVES
    private = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("allreduce", "allgather", "_allgather_base", "_reduce_scatter_base", "alltoall_base")
    }
    assert not private, "a process group's own methods"


def test_the_list_of_collectives_is_not_empty():
    """The test above would pass on nothing."""
    assert {"all_reduce", "broadcast", "all_to_all_single", "barrier"} <= COLLECTIVES
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= COLLECTIVES


def _is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _lightning_imports(tree):
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    tops = ("lightning", "pytorch_lightning", "lightning_fabric")
    return {name for name in found if name.split(".")[0] in tops}


@pytest.mark.parametrize("path", [p for p in files() if p.name != "_lightning.py"], ids=module_of)
def test_only_the_top_floor_knows_lightning(path):
    """`_lightning.py` imports its internals; two files name a base class for the type checker."""
    tree = ast.parse(path.read_text())
    if path.name in ("strategy.py", "monitor.py"):
        for node in ast.walk(tree):
            if _is_type_checking(node):
                node.body = []
    assert not _lightning_imports(tree)


def test_public_names_are_frozen():
    """A name added here is a promise; a name removed breaks someone."""
    assert sorted(lightning_zero.__all__) == sorted(PUBLIC)
    assert all(hasattr(lightning_zero, name) for name in PUBLIC)


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_all_names_what_exists(path):
    """`__all__` of each file lists its public names, and each is defined or imported there."""
    tree = ast.parse(path.read_text())
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    if not listed:
        assert path.name == "__init__.py"
        return
    source = path.read_text()
    assert all(source.count(name) > 1 for name in listed[0])


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_a_file_opens_with_its_sentence(path):
    """What it is, for the reader who opens it first."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":")) or "\n" in docstring


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_no_absolute_path_in_the_code(path):
    """Of anyone's machine; `/proc/meminfo` is the kernel's."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tops = ("/work", "/home", "/root", "/tmp", "/usr", "/opt", "/mnt", "/Users", "C:\\")
    assert not [text for text in strings if any(top in text for top in tops)]
