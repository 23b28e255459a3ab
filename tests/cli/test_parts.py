"""The parts of the command line that need no broker: lines, times, printing, settings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from firn.cli.lines import BadLine, LineCutter, parse_jsonl, parse_tsv
from firn.cli.printing import json_line, print_document, tsv_bytes
from firn.cli.times import parse_start, parse_time, time_text
from firn.errors import Invalid
from firn.record import Record, parse_document
from firn_node.config import SETTINGS, check_listen, configure, default_text, parse_config, unknown_variables
from firn_node.config_topics import read_topic_files
from firn_node.settings import BrokerSettings, SecuritySettings


@pytest.mark.parametrize(("output", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_a_file_name_that_is_no_text_is_printed_too(
    capsys: pytest.CaptureFixture[str], output: str, load: Callable[[str], object]
) -> None:
    name = b"a\xff".decode(errors="surrogateescape")
    assert print_document({"file": name}, output)
    assert load(capsys.readouterr().out) == {"file": name}


def test_a_table_is_not_printed_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert not print_document({}, "table")
    assert capsys.readouterr().out == ""


@given(st.binary(max_size=200), st.lists(st.integers(1, 30), max_size=50))
def test_lines_are_the_same_however_the_input_is_cut_into_blocks(data: bytes, sizes: list[int]) -> None:
    cutter, found, at = LineCutter(), [], 0
    for size in [*sizes, len(data) + 1]:
        first, lines = cutter.feed(data[at : at + size]) if data[at : at + size] else (0, [])
        if lines:
            assert first == len(found) + 1
        found += lines
        at += size
    first, lines = cutter.finish()
    assert first == len(found) + 1
    assert found + lines == (
        data.split(b"\n")[:-1] if data.endswith(b"\n") else data.split(b"\n") if data else []
    )


def test_a_line_that_no_record_can_fill_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("firn.cli.lines.LINE_BYTES_MAX", 100)
    cutter = LineCutter()
    cutter.feed(b"a\tb\nbegin")
    with pytest.raises(BadLine, match=r"line 2: longer than 100 bytes"):
        cutter.feed(b"x" * 100)


def test_tsv_is_key_separator_value_and_only_the_first_separator_counts() -> None:
    lines = [b"a\t1", b"b\tx\ty", b"\t", b"c\t"]
    found = list(parse_tsv(1, lines, separator=b"\t", empty_is_tombstone=False))
    assert found == [(b"a", b"1"), (b"b", b"x\ty"), (b"", b""), (b"c", b"")]
    found = list(parse_tsv(1, lines, separator=b"\t", empty_is_tombstone=True))
    assert found == [(b"a", b"1"), (b"b", b"x\ty"), (b"", None), (b"c", None)]


def test_a_line_without_separator_is_named_after_those_before_it() -> None:
    pairs = parse_tsv(7, [b"a::1", b"b:2"], separator=b"::", empty_is_tombstone=False)
    assert next(pairs) == (b"a", b"1")
    with pytest.raises(BadLine, match=r"line 8: no separator"):
        next(pairs)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"{}", b'{"key":null}', b'{"key":1}', b'{"key":"a","value":1}', b"\xff",
             b'{"key":"a","partition":"0"}', b'{"key_base64":"?"}', b'{"key":"\\ud800"}', b"[" * 100_000]
)  # fmt: skip
def test_a_line_that_is_no_record_is_named(line: bytes) -> None:
    with pytest.raises(BadLine, match=r"^line 4: "):
        list(parse_jsonl(4, [line], empty_is_tombstone=False))


RECORDS = st.builds(
    Record,
    st.just("flights"), st.integers(0, 9), st.integers(0, 1 << 62), st.integers(-1, 1 << 50),
    st.binary(max_size=20) | st.text(max_size=20).map(str.encode),
    st.none() | st.binary(max_size=20) | st.text(max_size=20).map(str.encode),
    st.none() | st.text(max_size=5),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
)  # fmt: skip


@given(RECORDS)
def test_a_printed_record_is_its_document_and_reads_back_as_the_same_record(record: Record) -> None:
    line = json_line(record)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert list(json.loads(line).items()) == list(record.document().items())
    back = parse_document(json.loads(line))
    assert (back.key, back.value, back.tag, back.headers or {}, back.queues) == (
        record.key, record.value, record.tag, record.headers, record.queues,
    )  # fmt: skip


def test_a_printed_record_is_written_as_the_interface_says() -> None:
    record = Record("flights", 0, 17, 1357034400000, b"N14228", "grün".encode())
    assert json_line(record) == (
        '{"topic":"flights","partition":0,"offset":17,"timestamp":1357034400000,'
        '"key":"N14228","value":"grün","tag":null,"headers":{}}\n'
    )
    assert json_line(Record("t", 0, 1, 2, b"\xff", None)) == (
        '{"topic":"t","partition":0,"offset":1,"timestamp":2,"key_base64":"/w==","value":null,"tag":null,"headers":{}}\n'
    )
    assert tsv_bytes(record) == "N14228\tgrün\n".encode()
    assert tsv_bytes(Record("t", 0, 1, 2, b"k", None)) == b"k\t\n"


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2013-01-01T10:00:00Z", 1_357_034_400_000),
        ("2013-01-01T05:00:00-05:00", 1_357_034_400_000),
        ("2013-01-01t10:00:00.0259z", 1_357_034_400_025),
        ("1969-12-31T23:59:59.5Z", -500),
        ("@1357034400000", 1_357_034_400_000),
        ("@-1", -1),
    ],
)
def test_a_time_is_rfc_3339_or_milliseconds(text: str, ms: int) -> None:
    assert parse_time(text) == ms
    assert parse_time(time_text(ms)) == ms


@pytest.mark.parametrize(
    "text", ["", "now", "2013-01-01", "2013-01-01T10:00:00", "@", "@1.5", "2013-13-01T00:00:00Z"]
)
def test_anything_else_is_no_time(text: str) -> None:
    with pytest.raises(Invalid, match="--since"):
        parse_time(text, field="--since")


def test_a_start_is_a_word_an_offset_or_a_time() -> None:
    assert [parse_start(text) for text in ("earliest", "latest", "17", "@17", "1970-01-01T00:00:00.017Z")] == [
        ("earliest", 0), ("latest", 0), ("offset", 17), ("time", 17), ("time", 17),
    ]  # fmt: skip
    for text in ("-1", "first", "1.5", ""):
        with pytest.raises(Invalid, match="--from"):
            parse_start(text)


def test_a_flag_wins_over_the_file_the_file_over_the_variable_and_that_over_the_default() -> None:
    flags = {"data": "d", "flushInterval": "1s"}
    file = {"flushInterval": "2s", "minDeadRatio": 0.2}
    environment = {"FIRN_FLUSH_INTERVAL": "3s", "FIRN_MIN_DEAD_RATIO": "0.3", "FIRN_DISK_RESERVE": "0.1"}
    found = configure(flags, file=file, file_name="f.yaml", environment=environment)
    s = found.settings
    assert (s.flush_interval_ms, s.min_dead_ratio, s.disk_reserve, s.reclaim_age_ms) == (
        1000,
        0.2,
        0.1,
        7 * 86_400_000,
    )
    assert found.sources["minDeadRatio"] == "f.yaml: minDeadRatio"


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS])
def test_every_setting_is_a_flag_a_file_key_and_a_variable_and_refuses_what_it_is_not(name: str) -> None:
    setting = next(s for s in SETTINGS if s.name == name)
    examples = {"duration_ms": "30s", "_address": "127.0.0.1:1", "_advertised": "broker:7700"}
    given = default_text(setting) or examples.get(setting.parse.__name__, "x")
    beside = {other: "x" for other in ("tlsCert", "tlsKey") if name.startswith("tls") and other != name}
    assert configure({"data": "d", name: given, **beside}, environment={}).sources[name] == setting.flag
    file = {"data": "d", name: given, **beside}
    assert configure({}, file=file, environment={}).sources[name].endswith(name)
    assert (
        configure(beside, environment={"FIRN_DATA": "d", setting.variable: given}).sources[name]
        == f"${setting.variable}"
    )
    if setting.parse.__name__ != "_text":
        any_text = ("_path", "_coordinator")  # may be a path
        wrong = "" if setting.parse.__name__ in any_text else "?"
        with pytest.raises(Invalid, match=setting.flag):
            configure({"data": "d", name: wrong}, environment={})


def test_the_documented_table_of_settings_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs/operating.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:5] for line in text.splitlines() if line.startswith("| `--")]
    assert [[cell.strip(" `") for cell in row] for row in rows] == [
        [setting.flag, setting.name, setting.variable, default_text(setting) or "-"] for setting in SETTINGS
    ]


def test_an_unknown_name_in_the_settings_file_is_refused_by_name() -> None:
    with pytest.raises(Invalid, match=r"firn\.yaml: flushIntervall: unknown setting"):
        parse_config("flushIntervall: 1s", source="firn.yaml")
    with pytest.raises(Invalid, match="expected a mapping"):
        parse_config("- 1", source="firn.yaml")
    assert parse_config("", source="firn.yaml") == {}


def test_a_misspelled_variable_is_told_and_those_of_kubernetes_are_not() -> None:
    environment = {
        "FIRN_FLUSH_INTERVALL": "1s", "FIRN_DATA": "d", "FIRN_BROKER": "b:1", "FIRN_SERVICE_HOST": "10.0.0.1",
        "FIRN_PORT": "tcp://10.0.0.1:7700", "FIRN_PORT_7700_TCP_ADDR": "10.0.0.1", "FIRN_0_SERVICE_PORT": "1", "HOME": "h",
    }  # fmt: skip
    assert unknown_variables(environment) == ["FIRN_FLUSH_INTERVALL"]


def test_nobody_listens_beyond_loopback_without_tls_and_authentication_unless_told_to() -> None:
    both = SecuritySettings(tls_cert="c", tls_key="k", tokens="t")
    for host in ("127.0.0.1", "127.0.0.9", "localhost", "::1"):
        check_listen(BrokerSettings("d", host=host))
    for host in ("0.0.0.0", "::", "192.168.1.2", "broker.example", "127.broker.example"):
        check_listen(BrokerSettings("d", host=host, security=both))
        check_listen(BrokerSettings("d", host=host, insecure=True))
        for security, missing in (
            (SecuritySettings(), "without TLS .* and authentication"),
            (SecuritySettings(tls_cert="c", tls_key="k"), "without authentication"),
            (SecuritySettings(tokens="t"), "without TLS"),
        ):
            with pytest.raises(Invalid, match=f"{missing}.*--insecure"):
                check_listen(BrokerSettings("d", host=host, security=security))


def test_settings_of_tls_have_variables_that_no_client_reads() -> None:
    given = {"FIRN_TLS_CERT": "client.crt", "FIRN_TLS_KEY": "client.key", "FIRN_TOKENS": "tokens.yaml"}
    found = configure({"data": "d"}, environment=given).settings.security
    assert (found.tls_cert, found.tls_key) == ("", "")
    assert found.tokens.endswith("/tokens.yaml")
    given = {"FIRN_SERVER_TLS_CERT": "node.crt", "FIRN_SERVER_TLS_KEY": "node.key"}
    found = configure({"data": "d"}, environment=given).settings.security
    assert found.tls_cert.endswith("/node.crt")


def test_a_certificate_without_its_key_and_a_ca_without_a_certificate_are_refused() -> None:
    for flags in ({"tlsCert": "c"}, {"tlsKey": "k"}, {"tlsCa": "a"}):
        with pytest.raises(Invalid, match="tlsKey"):
            configure({"data": "d", **flags}, environment={})


TOPIC = "apiVersion: firn.dev/v1alpha1\nkind: CompactedTopic\nmetadata: {name: %s}\n"


def test_topic_files_of_a_folder_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(TOPIC % "second")
    (tmp_path / "a.yml").write_text(TOPIC % "first" + "---\n" + TOPIC % "third")
    (tmp_path / "readme.txt").write_text("not a topic")
    assert [document.name for document in read_topic_files([str(tmp_path)])] == ["first", "third", "second"]


def test_a_topic_in_two_files_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Invalid, match="holds no topic file"):
        read_topic_files([str(tmp_path / "empty")])
    (tmp_path / "a.yaml").write_text(TOPIC % "one")
    (tmp_path / "b.yaml").write_text(TOPIC % "one")
    with pytest.raises(Invalid, match=r"b\.yaml: topic one is given in .*a\.yaml already"):
        read_topic_files([str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")])
