"""environment.yml, pyproject.toml, the Makefile and the README cannot disagree."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from importlib.metadata import requires
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:  # comes with pytest and mypy there
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
SCHEMA = {
    "type": "object",
    "required": ["name", "channels", "dependencies"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "channels": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "dependencies": {
            "type": "array",
            "items": {
                "oneOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "required": ["pip"],
                        "additionalProperties": False,
                        "properties": {"pip": {"type": "array", "items": {"type": "string"}}},
                    },
                ]
            },
        },
    },
}
CONDA_SPEC = re.compile(r"([a-z0-9_.-]+?)\s*((?:[<>=!]=?|~=)[\w.,<>=!*]+)?")


def problems(text: str) -> list[str]:
    """What is wrong with an environment file, beside what YAML and the schema refuse."""
    document = yaml.safe_load(text)
    jsonschema.validate(document, SCHEMA)
    conda: dict[str, str] = {}
    pip: list[str] = []
    found = []
    for entry in document["dependencies"]:
        if isinstance(entry, dict):
            pip += entry["pip"]
        elif match := CONDA_SPEC.fullmatch(entry):
            conda[match[1]] = match[2] or ""
        else:
            found.append(f"{entry!r} is no conda spec")
    if conda.get("python") != PROJECT["requires-python"]:
        found.append(f"python is {conda.get('python')!r}, not {PROJECT['requires-python']!r}")
    if "pip" not in conda:
        found.append("pip is missing")
    if pip != ["-e ."]:
        found.append(f"pip installs {pip}, not this package alone")
    found += [f"{name} belongs to pyproject.toml" for name in OWN & conda.keys()]
    return found


def test_the_environment_installs_this_package_and_states_no_versions_of_its_own() -> None:
    assert problems((ROOT / "environment.yml").read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("python>=3.10", "python>=3.9", "python is '>=3.9'"),
        ("  - python>=3.10\n", "", "python is None"),
        ("  - pip\n", "", "pip is missing"),
        ("  - pip\n", "  - pip\n  - torch>=2.9\n", "torch belongs to pyproject.toml"),
        ("- -e .", "- torch==2.9.1", "not this package alone"),
        ("  - pip\n", "  - pip => 4\n", "no conda spec"),
    ],
)
def test_a_wrong_environment_is_noticed(old: str, new: str, found: str) -> None:
    text = (ROOT / "environment.yml").read_text()
    assert old in text
    assert any(found in problem for problem in problems(text.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new"),
    [("channels:\n  - conda-forge", "channels: conda-forge"), ("name:", "nam:"), ("pip:", "pipp:")],
)
def test_an_environment_of_the_wrong_shape_is_noticed(old: str, new: str) -> None:
    text = (ROOT / "environment.yml").read_text()
    with pytest.raises(jsonschema.ValidationError):
        problems(text.replace(old, new, 1))


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    tested = dict(re.findall(r'"(torch|torchvision)==([\d.]+)"', (ROOT / "Makefile").read_text()))
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        if requirement.name in ("torch", "torchvision"):
            (lowest,) = requirement.specifier
            oldest = Version(tested.pop(requirement.name))
            assert lowest.operator == ">="
            assert oldest.release[:2] == Version(lowest.version).release
    assert not tested


def test_the_readme_names_the_versions_that_pyproject_allows() -> None:
    readme = (ROOT / "README.md").read_text()
    python = PROJECT["requires-python"].removeprefix(">=")
    torch = next(line for line in PROJECT["dependencies"] if line.startswith("torch>="))
    assert f"Python {python} or newer" in readme
    assert f"PyTorch {torch.removeprefix('torch>=')} or newer" in readme
    assert not SpecifierSet(PROJECT["requires-python"]).contains("3.9.18")


def test_the_installed_metadata_is_that_of_pyproject() -> None:
    installed = {
        canonicalize_name(Requirement(line).name)
        for line in requires("ddp-lab") or []
        if "extra ==" not in line
    }
    assert installed == OWN


def imported(folder: str) -> set[str]:
    """Top-level names that the Python files in a folder import."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def test_the_package_and_the_tests_import_nothing_undeclared() -> None:
    modules = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml", "IPython": "ipython"}
    modules |= {"websocket": "websocket-client", "tomli": "pytest", "tomllib": "pytest"}
    extra = {
        canonicalize_name(Requirement(line).name)
        for line in PROJECT["optional-dependencies"]["dev"]
    }
    # They come with what is declared and are part of its interface.
    given = {"numpy", "jupyter_client", "traitlets", "click"}
    for folder, allowed in (("ddp_lab", OWN), ("tests", OWN | extra), ("benchmarks", OWN | extra)):
        local = {"ddp_lab", "benchmarks", "tests"}
        local |= {path.stem for path in (ROOT / folder).rglob("*.py")}
        used = imported(folder) - set(sys.stdlib_module_names) - local - given
        undeclared = {
            name for name in used if canonicalize_name(modules.get(name, name)) not in allowed
        }
        assert not undeclared, f"{folder} imports {undeclared}"


def test_every_runtime_dependency_imports() -> None:
    modules = {"scikit-learn": "sklearn", "ipython": "IPython"}
    for name in sorted(OWN):
        importlib.import_module(modules.get(name, name))
