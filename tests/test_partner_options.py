"""Options that only add to another one: refused without it, for all commands by one table."""

import inspect
from typing import get_args

import pytest
from commands import hmoe
from typer.models import OptionInfo

from hmoe_repro.cli import data
from hmoe_repro.cli.app import COMMANDS
from hmoe_repro.cli.options import EXCLUDED, PARTNERS

ALL = COMMANDS | {f"data {name}": vars(data)[f"data_{name}_command"] for name in ("verify", "show")}
ALL["data download"] = data.data_download_command
# command -> its required arguments, of which nothing is read before the options are checked
NEEDED = {
    "discover": ["photos"],
    "data verify": ["photos"],
    "data download": ["PACS"],
    "embed": ["abc"],
    "report": ["study.toml"],
}
VALUES = {
    "seeds": ["5"],
    "output": ["out"],
    "sha256": ["0"],
    "by": ["class"],
    "map_method": ["tsne"],
    "formats": ["pdf"],
    "recipe": ["uniform"],
}
PAIRS = [(c, o, p) for c, table in PARTNERS.items() for o, p in table.items()]


def flag_of(command, name):
    """The flag of a parameter of a command."""
    _, settings = get_args(inspect.signature(ALL[command]).parameters[name].annotation)
    if not isinstance(settings, OptionInfo):
        return settings.metavar
    declared = [settings.default, *(settings.param_decls or ())]
    named = [flag for flag in declared if isinstance(flag, str) and flag.startswith("--")]
    return named[0].partition("/")[0] if named else f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("command, name, partners", PAIRS)
def test_an_option_is_refused_without_its_partner(tmp_path, command, name, partners):
    flag = flag_of(command, name)
    given = [*command.split(), *NEEDED.get(command, []), flag, *VALUES.get(name, [])]
    done = hmoe(*given, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{flag} does nothing without" in done.stderr
    for partner in partners.split():
        assert flag_of(command, partner) in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name != "runs"]


@pytest.mark.parametrize(
    "given, flag, other",
    [
        (["list", "--datasets", "--networks"], "--networks", "--datasets"),
        (["list", "--algorithms", "--datasets"], "--datasets", "--algorithms"),
        (["plan", "hmoe_fig3", "--all"], "--all", "PAGE"),
        (["sweep", "hmoe_fig3", "--all"], "--all", "PAGE"),
        (["reproduce", "hmoe_fig3", "--all"], "--all", "PAGE"),
    ],
)
def test_an_option_is_refused_next_to_one_that_replaces_it(tmp_path, given, flag, other):
    done = hmoe(*given, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{flag} does nothing next to {other}" in done.stderr


@pytest.mark.parametrize(
    "given, flag",
    [
        (["data", "show", "SpuriousColumns", "--images", "4"], "--images"),
        (["data", "show", "SpuriousColumns", "--plain"], "--plain"),
        (["data", "show", "SpuriousColumns", "--seed", "0"], "--seed"),
        (["data", "download", "MNIST", "--archive", "mnist.zip"], "--archive"),
        (["embed", "abc", "--weights", "random"], "--weights"),
        (["embed", "abc", "--dataset", "DigitDomains", "--compare", "abd"], "--dataset"),
        (["plan", "quick-digits", "--profile", "smoke"], "--profile"),
    ],
)
def test_an_option_that_these_data_do_not_have_is_refused(tmp_path, given, flag):
    done = hmoe(*given, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{flag} would be ignored" in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        ["list", "--datasets"],
        ["plan", "quick-digits"],
        ["plan", "hmoe_fig3", "--profile", "smoke"],
        ["data", "show", "DigitDomainsTiny", "--images", "2", "--plain"],
    ],
)
def test_options_with_their_partner_are_taken(tmp_path, given):
    done = hmoe(*given, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_table_names_options_that_exist():
    for table in (PARTNERS, EXCLUDED):
        for command, pairs in table.items():
            known = set(inspect.signature(ALL[command]).parameters)
            for name, others in pairs.items():
                assert {name, *others.split()} <= known, (command, name)


def test_every_option_whose_help_names_a_partner_is_in_the_table():
    checked = 0
    for command, function in ALL.items():
        for name, parameter in inspect.signature(function).parameters.items():
            _, settings = get_args(parameter.annotation)
            help_text = settings.help or ""
            if help_text.startswith("With --") or "of --picture" in help_text:
                checked += 1
                assert name in PARTNERS.get(command, {}), (command, name)
    assert checked >= 5
