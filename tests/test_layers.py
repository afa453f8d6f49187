"""Who may import whom, and what only one place may touch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each stands on those before it. Namespaces of the face hold imports only, and stand
# where what they name does.
ORDER = """
    checks notes checked_fields numerics beliefs joint_beliefs uncertain inputs cubature
    starting kernels means links likelihoods inducing processes sites program cache
    models guides results engines infer optimizers
    projection row_model simulation timeseries scaling plots comparison latent_space
    contracts testing
""".split()

# Operators make subclasses, which stand on what they operate on.
LOCAL = {
    ("numpyro_gpx/processes/latent.py", "numpyro_gpx.processes.products"),
    ("numpyro_gpx/processes/latent.py", "numpyro_gpx.processes.combining"),
    ("numpyro_gpx/kernels/base.py", "numpyro_gpx.kernels.combine"),
    ("numpyro_gpx/kernels/base.py", "numpyro_gpx.kernels.constant"),
    # A link by name may be a step, and a step may stand for a link by name.
    ("numpyro_gpx/links/piecewise.py", "numpyro_gpx.links.named"),
}

# One derivation each, which reads best in one piece.
LONG = {"numpyro_gpx/processes/psi.py"}


def sources():
    files = [
        path
        for folder in ("numpyro_gpx", "models", "guides")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]
    assert len(files) > 100
    return files


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def layer(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "numpyro_gpx" else parts[0]


def own_imports(tree):
    """Modules of ours that are imported, and whether inside a function.

    What only type checkers see does not count.
    """
    found = []

    def visit(node, local):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "") == "numpyro_gpx":
            found.extend((f"numpyro_gpx.{name.name}", local) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "numpyro_gpx."
        ):
            found.append((node.module, local))
        elif isinstance(node, ast.Import):
            found.extend(
                (name.name, local)
                for name in node.names
                if name.name.startswith("numpyro_gpx")
            )
        inside = local or isinstance(node, ast.FunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


TREES = {name_of(path): (path, ast.parse(path.read_text())) for path in sources()}
IMPORTS = {name: own_imports(tree) for name, (_, tree) in TREES.items()}


def test_the_order_names_every_part():
    parts = {layer(path) for path, _ in TREES.values()} - {"__init__"}
    assert parts == set(ORDER)


def test_imports_go_one_way():
    wrong = []
    for name, found in IMPORTS.items():
        here = layer(TREES[name][0])
        if here == "__init__":
            continue
        for module, _ in found:
            there = module.split(".")[1]
            if there != here and ORDER.index(there) > ORDER.index(here):
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_no_import_hides_inside_a_function():
    hidden = {
        (name, module)
        for name, found in IMPORTS.items()
        for module, local in found
        if local
    }
    assert hidden == LOCAL


def test_only_sites_know_the_observed_distributions():
    observed = {"ExpectedLikelihood", "ExactRegression"}
    seen = set()
    for name, (_, tree) in TREES.items():
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        used |= {
            alias.name
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom)
            for alias in n.names
        }
        if used & observed:
            seen.add(name.rsplit("/", 1)[0])
    assert seen == {"numpyro_gpx/sites"}


def test_only_marks_look_into_the_infer_dictionary():
    def looks(node):
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Constant) and node.slice.value == "infer"
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "pop", "setdefault")
            and bool(node.args)
            and isinstance(node.args[0], ast.Constant)
            and node.args[0].value == "infer"
        )

    seen = {n for n, (_, tree) in TREES.items() if any(map(looks, ast.walk(tree)))}
    assert seen == {"numpyro_gpx/sites/marks.py"}


def test_arguments_of_models_travel_as_calls():
    """Outside `program/`, nobody takes loose `args` and `kwargs`."""
    loose = []
    for name, (_, tree) in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if {a.arg for a in every} & {"args", "kwargs"}:
                    loose.append(name)
    assert loose
    assert all(name.startswith("numpyro_gpx/program/") for name in loose), loose


def test_files_are_short():
    lengths = {n: len(p.read_text().splitlines()) for n, (p, _) in TREES.items()}
    assert {n for n, length in lengths.items() if length >= 400} <= LONG


def test_planted_faults_are_seen():
    tree = ast.parse(
        "from numpyro_gpx.engines import svi\n"
        "def f():\n    from numpyro_gpx import plots\n"
    )
    assert own_imports(tree) == [
        ("numpyro_gpx.engines", False),
        ("numpyro_gpx.plots", True),
    ]


@pytest.mark.parametrize("folder", ["models", "guides"])
def test_models_know_no_guides_and_guides_no_models(folder):
    """A new one of either touches no file of the other."""
    (other,) = {"models", "guides"} - {folder}
    mine = [found for name, found in IMPORTS.items() if name.startswith(folder)]
    assert mine
    for found in mine:
        assert not [m for m, _ in found if m.startswith(f"numpyro_gpx.{other}")]
