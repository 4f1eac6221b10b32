"""Others cite the project and file its issues by these files."""

import yaml

from mprun import __version__

from ..pages import ROOT
from .test_install import PROJECT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_it_is_cited_by_the_version_and_license_that_are_packaged():
    cited = read(ROOT / "CITATION.cff")
    # What the format's version 1.2.0 requires.
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["title"], cited["version"]) == (PROJECT["name"], __version__)
    assert cited["license"] == PROJECT["license"] and cited["authors"] == PROJECT["authors"]


def test_the_forms_of_issues_are_forms():
    forms = {path.name: read(path) for path in FORMS if path.name != "config.yml"}
    assert len(forms) == 3 and read(FORMS[0].with_name("config.yml"))["blank_issues_enabled"]
    for name, form in forms.items():
        assert {"name", "description", "body"} <= set(form), name
        assert all(one["attributes"]["label"] for one in form["body"]), name
        ids = [one["id"] for one in form["body"]]
        assert len(set(ids)) == len(ids), name
        # One at least must be filled in, or an empty issue is sent.
        assert any(one.get("validations", {}).get("required") for one in form["body"]), name
