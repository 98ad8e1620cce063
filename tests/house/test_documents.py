"""The documents say what is there, and their code runs as printed."""

import ast
import importlib
import inspect
import itertools
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
from trees import nodes

import torch_ros
import torch_ros.bucket
import torch_ros.dcp
import torch_ros.metrics
import torch_ros.store
from torch_ros import environment, errors
from torch_ros.cli import main
from torch_ros.local import etcd as local

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
PAGES = DOCUMENTS + sorted((ROOT / "deploy").rglob("*.md"))
PARTS = ("torch_ros", "tests", "benchmarks", "examples", "docs", "deploy")
# A name of the API as a code host shows it: its file and the first words of its docstring.
SUMMARY = re.compile(r"^### \[`([\w.]+)`\]\((?P<file>.+)\)\n\n(?P<says>.+)$", re.MULTILINE)
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


RUN = [
    "README.md",
    "docs/TUTORIAL.md",  # what is not a program: tests/processes/test_tutorial.py runs those
    pytest.param("docs/API.md", marks=pytest.mark.long),
    pytest.param("docs/DISTRIBUTED.md", marks=pytest.mark.long),
]


@pytest.mark.parametrize("name", RUN)
def test_code_runs_as_printed(name, started):
    code = "\n".join(FENCE.findall((ROOT / name).read_text()))
    assert "torch_ros" in code
    started.start(code).finish(100)


@pytest.mark.parametrize(
    "module",
    [torch_ros, torch_ros.bucket, torch_ros.dcp, torch_ros.metrics, torch_ros.store],
    ids=lambda m: m.__name__,
)
def test_exported_names_are_documented_and_listed_in_the_api(module):
    api = (ROOT / "docs" / "API.md").read_text()
    listed = {found[1]: found for found in SUMMARY.finditer(api)}
    for name in module.__all__:
        thing = getattr(module, name)
        summary = listed[f"{module.__name__}.{name}"]
        if not isinstance(thing, types.UnionType):  # which has no docstring of its own
            first = inspect.getdoc(thing).partition("\n\n")[0].replace("\n", " ")
            assert summary["says"] == first, name
            file = Path(inspect.getsourcefile(thing)).relative_to(ROOT)
            assert summary["file"] == f"../{file}", name
        if inspect.isclass(thing):
            for attribute, value in vars(thing).items():
                is_public = not attribute.startswith("_") and callable(value)
                assert not is_public or value.__doc__ or attribute in vars(thing.__base__), (
                    f"{name}.{attribute}"
                )


def test_a_summary_of_the_api_becomes_the_docstring_on_the_site():
    on_page_markdown = runpy.run_path(ROOT / "docs" / "site_files.py")["on_page_markdown"]
    page = on_page_markdown((ROOT / "docs" / "API.md").read_text())
    assert "\n\n::: torch_ros.open\n\n" in page
    assert not SUMMARY.search(page)
    assert "::: torch_ros" not in (ROOT / "docs" / "API.md").read_text()  # bare on a code host


def test_importing_the_package_is_light():
    code = "import sys, torch_ros, torch_ros.store.local; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_the_readme_has_the_two_commands_and_the_makefile_has_them():
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 150
    for command in ("demo", "test"):
        assert f"\nmake {command} " in readme
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def anchors(document):
    """The anchors of its headings, as code hosts and the site make them."""
    for heading in re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE):
        text = re.sub(r"\]\([^)]*\)", "", heading)
        yield re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-")


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_links_lead_to_headings(document):
    for file, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text()):
        if "://" not in file:
            there = (document.parent / file).resolve() if file else document
            assert there.suffix != ".md" or anchor in anchors(there), f"{file}#{anchor}"


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_files_that_are_named_are_there(document):
    there = [str(path) for part in PARTS for path in (ROOT / part).rglob("*.*")]
    for named in re.findall(r"`([\w./]+\.(?:py|sh))`", document.read_text()):
        assert any(path.endswith(f"/{named}") for path in there), named


def test_every_module_imports_and_says_what_it_is():
    for path in sorted((ROOT / "torch_ros").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        try:
            says = path.stat().st_size == 0 or importlib.import_module(name).__doc__
        except ModuleNotFoundError as error:  # of an engine, which is not installed here
            assert error.name.partition(".")[0] == path.parent.name, name
            says = ast.get_docstring(ast.parse(path.read_text()))
        assert says, name


def section(title):
    text = (ROOT / "docs" / "OPERATIONS.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_operations_lists_each_environment_variable_of_ours():
    ours = {value for value in vars(environment).values() if str(value).startswith("TORCH_ROS_")}
    listed = re.findall(r"^\| (`.*?`) \|", section("Environment variables"), re.MULTILINE)
    assert set(re.findall(r"TORCH_ROS_\w+", " ".join(listed))) == ours | {local.DIRECTORY}


def test_operations_lists_each_thread_of_a_handle():
    listed = set(
        re.findall(r"`(torch_ros [^`<]+|[a-z]+ )[`<]", (ROOT / "docs/OPERATIONS.md").read_text())
    )
    for path in (ROOT / "torch_ros").rglob("*.py"):
        if path.parent.name != "cli":
            named = set(re.findall(r'name=f?"(torch_ros [^"{]+|session )', path.read_text()))
            assert named <= listed, f"{path.name}: {named - listed}"


def warnings_of_the_log():
    """The text of each line at WARNING or above, and the file that logs it."""
    for path in sorted((ROOT / "torch_ros").rglob("*.py")):
        for node in nodes(path.read_text()):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name("log" | "logger"), attr=level), args=args
                ) if level not in {"debug", "info"}:
                    yield path.name, next((ast.literal_eval(a) for a in args if is_text(a)), "")


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.xdist_group("trees")
def test_operations_has_each_warning_of_the_log():
    """Its first clause, as one would search for it."""
    told = " ".join((ROOT / "docs" / "OPERATIONS.md").read_text().replace("*", "").split())
    lacking = []
    for name, text in warnings_of_the_log():
        clauses = [each.strip() for each in re.split(r"%[-+.\d]*[a-z]|[;:,(]|\. ", text)]
        first = next((each for each in clauses if " " in each), "")
        if first not in told:
            lacking.append((name, first))
    assert lacking == []


def texts_of(node, there, module):
    """The texts that an expression may be, with "..." for what a run alone knows."""
    match node:
        case ast.Constant(str(text)):
            return [text]
        case ast.IfExp():
            return [*texts_of(node.body, there, module), *texts_of(node.orelse, there, module)]
        case ast.FormattedValue():
            return texts_of(node.value, there, module)
        case ast.JoinedStr():
            parts = [texts_of(part, there, module) for part in node.values]
            return ["".join(each) for each in itertools.product(*parts)]
        case ast.Name(name):
            made = [each for each in ast.walk(there) if isinstance(each, ast.Assign)]
            named = [each.value for each in made if ast.unparse(each.targets[0]) == name]
            return [t for value in named for t in texts_of(value, there, module)] or ["..."]
        case ast.Call(ast.Name("_ranks")):
            return ["rank ..."]
        case ast.Call(ast.Name("seat_lost")):
            [told] = [e for e in module.body if getattr(e, "name", "") == "seat_lost"]
            [end] = [each for each in ast.walk(told) if isinstance(each, ast.Return)]
            return texts_of(end.value, told, module)
    return ["..."]


def test_operations_has_each_answer_of_why():
    table = section("A rollout does not update").partition("| `why` says |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    phrases = [told for row in rows for told in re.findall("`(.+?)`", row)]
    module = ast.parse((ROOT / "torch_ros" / "cli" / "waits.py").read_text())
    found = [
        text
        for there in module.body
        if getattr(there, "name", "") != "_from"  # which adds the source's name
        for call in ast.walk(there)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {"_Found", "_from"}
        for text in texts_of(call.args[0], there, module)
    ]
    found += ["waits for that itself"]
    patterns = {each: ".*".join(map(re.escape, each.split("..."))) for each in phrases}
    assert [t for t in found if not any(re.search(each, t) for each in patterns.values())] == []
    assert [each for each, it in patterns.items() if not re.search(it, "\n".join(found))] == []


def test_operations_has_each_error():
    told = section("Errors")
    classes = (value for value in vars(errors).values() if inspect.isclass(value))
    ours = (value.__name__ for value in classes if issubclass(value, errors.TorchRosError))
    assert [name for name in ours if f"`{name}`" not in told] == []


def test_operations_has_each_exit_code():
    codes = {main.FINE, main.NOT_FINE, main.USAGE, main.UNREACHABLE, main.INTERRUPTED}
    listed = re.findall(r"^\| (\d+) \|", section("Exit codes"), re.MULTILINE)
    assert set(map(int, listed)) == codes


def test_the_pictures_are_what_their_script_draws():
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"]
    drawn = {name: draw() for name, draw in pictures.items()}
    folder = ROOT / "docs" / "pictures"
    assert {path.name: path.read_text() for path in folder.iterdir()} == drawn
    shown = re.findall(r"\]\(pictures/(\S+)\)", (ROOT / "docs" / "CONCEPTS.md").read_text())
    assert sorted(shown) == sorted(drawn)


def test_the_figures_are_what_their_run_has_written():
    docs = ROOT / "docs" / "benchmarks"
    report = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    found = report["from_json"]((docs / "results.json").read_text())
    assert report["page"](*found) == (docs / "README.md").read_text()


PROTOCOL_PAGES = sorted((ROOT / "docs" / "protocol").glob("*.md"))
ENGINE_PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
WORDS_MAX = {
    ROOT / "CHANGELOG.md": 1000,  # merges keep both sides: a rewritten section can come back
    ROOT / "docs" / "CONCEPTS.md": 1000,
    ROOT / "docs" / "OPERATIONS.md": 6200,
    ROOT / "docs" / "PROTOCOL.md": 7400,
    **dict.fromkeys(PROTOCOL_PAGES, 1000),
    **dict.fromkeys(ENGINE_PAGES, 700),
    ROOT / "docs" / "integrations" / "vllm.md": 2300,
    ROOT / "docs" / "protocol" / "nixl.md": 1200,  # ways, shortcuts and vouchers
    ROOT / "deploy" / "ray" / "README.md": 300,
    ROOT / "deploy" / "slurm" / "README.md": 500,
}


def word_count(document):
    return len(re.findall(r"\S*\w\S*", document.read_text()))


@pytest.mark.parametrize("document", WORDS_MAX, ids=lambda path: path.name)
def test_a_document_is_no_longer_than_its_reader_has_time_for(document):
    assert word_count(document) <= WORDS_MAX[document]


def test_all_documents_together_are_no_longer_than_a_short_book():
    """But for engines' pages, of which a reader needs one."""
    assert sum(word_count(document) for document in {*DOCUMENTS}.difference(ENGINE_PAGES)) <= 51_000


@pytest.mark.parametrize("page", PROTOCOL_PAGES + ENGINE_PAGES, ids=lambda path: path.name)
def test_the_site_has_each_page_of_the_protocol_and_of_the_engines(page):
    assert f"- {page.relative_to(ROOT)}\n" in (ROOT / "mkdocs.yml").read_text()
