"""Code and paths outside of a run: how they are typed, what vouches for them, what never does."""

import re

import pytest
import yaml

from mprun.config.compose import compose_config, config_from_record
from mprun.config.keys import FIELDS, PLACES, role_of
from mprun.config.overrides import parse_overrides
from mprun.config.trust import NOTHING, Vouched, as_overrides, check_vouched, outside, vouched
from mprun.errors import BadInput
from mprun.record.keys import READING
from mprun.sweeps.plan import plan

from ..helpers import refused

OWN = ["model=custom", "data.factory=my.data:make", "model.factory=net:build"]
NET = "model=custom model.factory=a:b model.task"


# What is typed, and what it is.
TYPED = {"3": 3, "-2": -2, "0.5": 0.5, "1e-3": 1e-3, "true": True, "null": None, "abc": "abc"}
TYPED |= {"'3'": "3", "a/b.txt": "a/b.txt", "[1,2.5,x]": [1, 2.5, "x"]}
TYPED |= {"{a:1,b:[c]}": {"a": 1, "b": ["c"]}}


@pytest.mark.parametrize(("text", "value"), TYPED.items())
@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.few(8)
def test_an_option_has_the_type_it_is_typed_with(text, value, prefix):
    config = compose_config([*OWN, f"{prefix}data.options.x={text}"]).config
    assert config.data.options == {"x": value} and config.model.options == {}
    assert type(config.data.options["x"]) is type(value)


def test_options_add_up_and_nest():
    overrides = ["model.options={a:1}", "model.options.b=2", "model.options.c.d=3"]
    config = compose_config([*OWN, *overrides]).config
    assert config.model.options == {"a": 1, "b": 2, "c": {"d": 3}}


def test_a_sweep_over_an_option_and_over_a_factory():
    cells = plan([*OWN, "data.options.x=1,b", "model.factory=net:build,net:other"], None).cells
    assert len({cell.directory for cell in cells}) == len({cell.config_hash for cell in cells}) == 4
    assert [cell.outside for cell in cells[:2]] == [
        ("data.factory=my.data:make", "model.factory=net:build"),
        ("data.factory=my.data:make", "model.factory=net:other"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("model=custom", "data=custom model=custom: needs data.factory=|model.factory="),
        ("data=custom", "data=custom: needs data.factory=package.module:function"),
        ("model=custom data=digits_32", "model=custom: needs model.factory="),
        ("data=custom data.factory=x", "data.factory=x|package.module:function"),
        ("data=custom data.factory=a:b:c", "data.factory=a:b:c|package.module:function"),
        ("data=custom data.factory=a-b:c", "data.factory=a-b:c|package.module:function"),
        ("data=custom data.factory=[1]", "data.factory"),
        ("data=custom data.factory=", "data.factory=|package.module:function"),
        ("data.factory=a:b", "data.factory: unknown key|data=custom"),
        ("data.options.x=3", "data.options.x: unknown key|data=custom"),
        ("model.options.x=3", "model.options.x: unknown key|model=custom"),
        ("data=custom data.factory=a:b data.options=5", "data.options=5|data.options.NAME=VALUE"),
        ("data=custom data.factory=a:b data.option.x=3", "data.option.x|'data.options'"),
        ("data=custom optim.lr=abc", "optim.lr=abc"),
        ("data=custom data.factory=a:b optim.lr=abc", "optim.lr=abc"),
        ("data=custom data.factory=a:b data.options.x=1,2", "data.options.x=1,2|-m"),
        ("model=dcgan data=custom data.factory=a:b", "data.image_size=null|dcgan"),
        (f"data.factory=a:b {NET}=x", "model.task=x|gan"),
        (f"data.factory=a:b {NET}=gan model.label_smoothing=0.1", "model.label_smoothing=0.1|gan"),
        (f"data=digits_32 {NET}=language_model", "data.name=digits|data=docs_chars"),
    ],
)
def test_what_cannot_be_is_one_line(command, wanted, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "--cfg", "job", *command.split(), says=wanted.split("|"))
    assert len(line) <= 201


GLOBAL = "# @package _global_\ndefaults:\n  - override /data: custom\n"


def test_an_option_of_the_user_names_a_factory(tmp_path):
    for name, text in (
        ("model/mine.yaml", "defaults: [custom]\nfactory: 'net:build'\noptions: {width: 3}\n"),
        ("experiment/all.yaml", f"{GLOBAL}data: {{factory: 'my.data:make'}}\n"),
        ("broken.yaml", "a: ["),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    composed = compose_config(["model=mine", "experiment=all"], str(tmp_path))
    assert composed.config.model.options == {"width": 3}
    named = frozenset({("model.factory", "net:build"), ("data.factory", "my.data:make")})
    assert vouched([], str(tmp_path)) == Vouched({}, named)
    record = yaml.safe_load(yaml.safe_dump(composed.as_dict()))
    assert config_from_record(record, vouched([], str(tmp_path))) == composed.config
    with pytest.raises(BadInput, match="names code"):
        config_from_record(record)


DATA, FACTORY = "data: {factory: 'a:b'}", "factory: 'a:b'"


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        *((path, FACTORY, "data") for path in ("data/x.yaml", "data/deeper/x.yaml")),
        ("model/x.yaml", FACTORY, "model"),
        ("experiment/deeper/x.yaml", "model: {factory: 'a:b'}", "model"),
        # No option files, or of no group that has a factory.
        *((path, DATA, None) for path in ("x.yaml", "optim/x.yaml", "run/config.yaml")),
        *((path, FACTORY, None) for path in ("data.yaml", "data/x.yml", "run/data/x.yaml")),
        # The name belongs to another key, or to none.
        *(("data/x.yaml", text, None) for text in (DATA, "model: {factory: 'a:b'}", "[a]")),
        ("experiment/x.yaml", FACTORY, None),
    ],
)
def test_which_files_vouch_for_what(path, text, wanted, tmp_path):
    place = tmp_path / "mine" / path
    place.parent.mkdir(parents=True)
    place.write_text(text)
    expected = frozenset() if wanted is None else {(f"{wanted}.factory", "a:b")}
    assert vouched([], str(tmp_path / "mine")).files == expected
    # Below a run directory, wherever that begins, nothing counts; nor behind a link into one.
    elsewhere = tmp_path / "linked" / path
    elsewhere.parent.mkdir(parents=True)
    elsewhere.symlink_to(place)
    assert vouched([], str(tmp_path / "linked")).files == expected
    (tmp_path / "mine" / "run.json").write_text("{}")
    assert vouched([], str(tmp_path / "mine")).files == frozenset()
    assert vouched([], str(tmp_path / "linked")).files == frozenset()


def test_a_record_alone_vouches_for_nothing():
    named = {"data.factory": "a:b", "model.factory": "c:d"}
    with pytest.raises(BadInput, match=r"add data\.factory=a:b model\.factory=c:d$"):
        check_vouched(named, NOTHING)
    with pytest.raises(BadInput, match=r"add model\.factory=c:d$"):
        check_vouched(named, vouched(["data.factory=a:b"]))
    with pytest.raises(BadInput, match=r"data\.factory=a:x: the run was made with .*=a:b"):
        check_vouched(named, vouched(["data.factory=a:x", "model.factory=c:d"]))
    with pytest.raises(BadInput, match=r"data\.factory=a:b: the run has no data\.factory"):
        check_vouched({}, vouched(["data.factory=a:b"]))
    check_vouched(named, vouched(["data.factory=a:b", "++model.factory='c:d'", "seed=1"]))
    check_vouched({}, NOTHING)
    # The name of a data factory does not vouch for a network, nor that of one file for another key.
    swapped = Vouched({}, frozenset({("model.factory", "a:b")}))
    with pytest.raises(BadInput, match="names code"):
        check_vouched({"data.factory": "a:b"}, swapped)


_PLACE = r"(Folder|Cache folder|(Vocabulary|Subword) file|File (of|below)|Run d|Directory|Manifest)"


def test_every_field_that_holds_a_path_is_declared_as_one():
    docs = {key: [field.metadata["doc"] for field in fields] for key, fields in FIELDS.items()}
    paths = {key for key, said in docs.items() if any(re.match(_PLACE, one) for one in said)}
    below = {key for key, (field, *_) in FIELDS.items() if "below_root" in field.metadata}
    # Nothing is read or written where a record's run was placed.
    assert paths == {*PLACES, *below, "output_root", "output_dir", "resume"}
    assert {"data.root", "data.cache", "data.vocabulary"} <= set(PLACES)
    assert {key for key in PLACES if role_of(key) is not READING} <= {"model.weights"}


def test_what_lies_outside_of_a_run():
    options = {"where": "/a", "two": ["x", "../b"], "name": "c.d", "n": 3, "in": {"it": "~/e"}}
    data = {"root": "/data", "cache": None, "options": options}
    assert outside({"data": data, "output_root": "/o", "seed": 1}) == {
        "data.root": "/data",
        "data.options.where": "/a",
        "data.options.two": ["x", "../b"],
        "data.options.in": {"it": "~/e"},
    }
    # As overrides they parse to the same values, whatever is in them.
    odd = {"data": {"root": "a b, 'c'", "options": options}}
    again = vouched(as_overrides(odd))
    assert again.typed == outside(odd)
    check_vouched(outside(odd), again)


WHY = "mprun uses recorded code and paths"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"data.root": "/d"}, f"data.root=/d: the run's record names this path. {WHY}"),
        # The name of a module of mprun, which needs no naming, is one of code alone.
        ({"data.cache": "mprun.models./../../etc"}, "data.cache=mprun.models./../../etc: the run"),
        ({"data.options.x": "/d"}, "add data.options.x=/d"),
        ({"data.factory": "a:b", "data.root": "/d"}, "add data.factory=a:b data.root=/d"),
    ],
)
def test_a_path_in_a_record_counts_only_if_it_is_named_too(named, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        check_vouched(named, NOTHING)
    check_vouched(named, vouched([f"{key}={value}" for key, value in named.items()]))
    check_vouched(named, Vouched({}, frozenset(named.items())))
    with pytest.raises(BadInput, match=re.escape(words)):
        check_vouched(named, Vouched({}, frozenset((key, "other") for key in named)))


def test_where_the_data_are_now_is_what_the_command_says():
    plain = compose_config(["model=resnet50", "data=cifar10", "data.root=/then"], files=False)
    record = plain.as_dict()
    config = config_from_record(record, vouched(["++data.root='.'"]))
    assert config.data.root == "." and record["data"]["root"] == "/then"
    with pytest.raises(BadInput, match=r"data\.root=/then: .* add data\.root=/then$"):
        config_from_record(record)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x"])
def test_a_file_below_the_root_lies_below_it(name):
    pytest.importorskip("mprun.extensions.speech")
    manifest = f"data.eval_manifest={name}"
    with pytest.raises(BadInput, match=f"{manifest}: must be a path below data.root"):
        compose_config(["model=deep_speech2", "data=speech_manifest", "data.root=.", manifest])


@pytest.mark.parametrize("name", [3, None, "", "os", "os:system; rm", "a:b\n", ["a:b"], ":f", "a:"])
def test_a_recorded_name_of_another_form_is_refused(name):
    with pytest.raises(BadInput, match="package.module:function"):
        outside({"data": {"factory": name}})


def test_one_factory_at_a_time():
    with pytest.raises(BadInput, match="one value"):
        vouched(["data.factory=a:b,c:d"])


def test_a_record_holds_no_interpolation():
    plain = compose_config(["seed=1"]).as_dict()
    for change in ({"output_root": "${oc.env:HOME}"}, {"name": "${seed}"}):
        with pytest.raises(BadInput, match="must not contain"):
            config_from_record(plain | change)
    own = compose_config(OWN).as_dict()
    own["data"]["options"] = {"x": ["${oc.env:HOME}"]}
    with pytest.raises(BadInput, match="must not contain"):
        config_from_record(own, vouched(OWN))


def test_other_keys_are_no_entries_of_a_mapping():
    # "data.optionsx" only begins like one.
    with pytest.raises(BadInput, match="data.optionsx: unknown key"):
        compose_config([*OWN, "data.optionsx=3"])
    assert parse_overrides(["data.options.x=3"])[0].key_or_group == "data.options.x"
