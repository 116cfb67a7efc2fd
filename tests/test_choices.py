"""The README's table of choices is the current one."""

from pathlib import Path

from transformer import choices


def test_the_readme_has_the_current_table():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert choices.BEGIN in readme and choices.END in readme
    assert readme == choices.inserted(readme), "run: python scripts/choices.py"


def test_every_name_of_every_table_is_in_it():
    table = choices.table()
    for path, field in choices._choices(choices.RunSpec):
        assert f"`{path}`" in table
        for name in field.metadata["table"]:
            assert f"| `{name}` |" in table
